"""A run that is interrupted and resumed ends exactly where an uninterrupted one does."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

from lightning_moe import MoEModule, OptimConfig, TokenDataModule
from tests.kit.runs import GAMMA, History, make_module, make_trainer, tiny_config
from tests.kit.step_logger import StepLogger

# A resumed run writes where the first one wrote.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

ROUTER: dict[str, Any] = {
    "bias_gamma": GAMMA,
    "jitter_eps": 0.2,
    "lb_loss_weight": 0.1,
    "z_loss_weight": 0.01,
}
STEPS = OptimConfig(lr=0.01, schedule="wsd", warmup=3, decay=4, decay_shape="1-sqrt")
# Steps of 2 micro-batches of 2 rows of 8 tokens.
TOKENS = OptimConfig(lr=0.01, schedule="cosine", unit="tokens", warmup=96, total=288)


def _data(folder: Path, num_workers: int) -> TokenDataModule:
    """13 micro-batches per epoch: six steps of two, and one of one."""
    generator = torch.Generator().manual_seed(2)
    for name, length in (("train", 13 * 2 * 8 + 1), ("val", 40)):
        text = torch.randint(256, (length,), generator=generator).tolist()
        (folder / f"{name}.txt").write_bytes(bytes(text))
    return TokenDataModule.from_text(
        str(folder / "train.txt"),
        val_paths=(str(folder / "val.txt"),),
        sequence_length=8,
        batch_size=2,
        num_workers=num_workers,
    )


class _Interruption(Exception):
    """None of the program's own errors."""


class _Interrupt(L.Callback):
    """Ends training like a crash would, before micro-batch number `batch`."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise _Interruption


@dataclass
class _Fit:
    module: MoEModule
    trainer: L.Trainer
    history: History
    logger: StepLogger

    def state(self) -> dict[str, Any]:
        """Weights, biases, moments and learning rates."""
        optimizer = self.trainer.optimizers[0].state_dict()
        rates = [group["lr"] for group in optimizer["param_groups"]]
        return {"model": self.module.state_dict(), "moments": optimizer["state"], "lr": rates}


def _prepare(
    folder: Path, optim: OptimConfig, seed: int, *callbacks: L.Callback, **options: object
) -> _Fit:
    router = {"lb_loss_scope": options.pop("scope", "sequence")}
    config = replace(tiny_config(**(ROUTER | router)), vocab_size=264)
    history, logger = History(), StepLogger()
    trainer = make_trainer(
        folder,
        callbacks=[LearningRateMonitor(), history, *callbacks],
        logger=logger,
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        **({"max_steps": 9, "max_epochs": -1} | options),
    )
    return _Fit(make_module(config, MoEModule, optim, seed=seed), trainer, history, logger)


def _saver(folder: Path, saves: dict[str, Any]) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_last=True, save_top_k=-1, **saves)


def _resume_and_compare(
    folder: Path,
    optim: OptimConfig,
    *,
    batch: int,
    num_workers: int = 0,
    saves: dict[str, Any] | None = None,
    then: dict[str, Any] | None = None,
    **options: object,
) -> None:
    """`then` are options that the resumed run has differently."""
    saves = {"every_n_train_steps": 2} if saves is None else saves
    straight = _prepare(folder, optim, 3, _saver(folder / "straight", saves), **options)
    straight.trainer.fit(straight.module, datamodule=_data(folder, num_workers))

    saver = _saver(folder / "cut", saves)
    first = _prepare(folder, optim, 3, saver, _Interrupt(batch), **options)
    with pytest.raises(_Interruption):
        first.trainer.fit(first.module, datamodule=_data(folder, num_workers))
    # Other initial weights and another state of torch's generator: all must come from the file.
    options |= then or {}
    resumed = _prepare(folder, optim, 4, _saver(folder / "cut", saves), **options)
    resumed.trainer.fit(resumed.module, datamodule=_data(folder, num_workers), ckpt_path="last")

    torch.testing.assert_close(resumed.state(), straight.state(), rtol=0, atol=0)
    assert resumed.trainer.global_step == straight.trainer.global_step == 9
    num_resumed = len(resumed.history.steps)
    assert 0 < num_resumed < 9
    assert resumed.history.steps == straight.history.steps[-num_resumed:]
    assert _of_training(resumed) == _of_training(straight)[-len(_of_training(resumed)) :]


def _of_training(fit: _Fit) -> list[tuple[int, list[str]]]:
    """Of each step, first what the learning-rate monitor logs, then the rest."""
    return [(step, names) for step, names in fit.logger.steps if "val/ce" not in names]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_in_the_middle_of_an_epoch_is_exactly_like_not_stopping(
    tmp_path: Path, num_workers: int
) -> None:
    _resume_and_compare(tmp_path, STEPS, num_workers=num_workers, batch=10)


@pytest.mark.parametrize("scope", ["lagged", "exact"])
def test_resuming_knows_the_counts_that_the_balance_loss_needs(tmp_path: Path, scope: str) -> None:
    _resume_and_compare(tmp_path, STEPS, batch=10, scope=scope)


def test_resuming_from_a_step_with_validation_is_exactly_like_not_stopping(tmp_path: Path) -> None:
    _resume_and_compare(tmp_path, STEPS, batch=10, val_check_interval=4)


def test_resuming_from_what_a_validation_saved_is_exactly_like_not_stopping(
    tmp_path: Path,
) -> None:
    saves = {"monitor": "val/ce", "every_n_epochs": 1}
    _resume_and_compare(tmp_path, STEPS, batch=10, saves=saves, val_check_interval=6)


def test_loggers_get_the_same_steps_when_validation_is_due_at_others(tmp_path: Path) -> None:
    saves = {"monitor": "val/ce", "every_n_epochs": 1}
    _resume_and_compare(
        tmp_path, STEPS, batch=10, saves=saves, val_check_interval=6, then={"val_check_interval": 7}
    )


def test_resuming_in_the_second_epoch_is_exactly_like_not_stopping(tmp_path: Path) -> None:
    _resume_and_compare(tmp_path, STEPS, batch=16)


def test_resuming_at_the_end_of_an_epoch_is_exactly_like_not_stopping(tmp_path: Path) -> None:
    _resume_and_compare(tmp_path, STEPS, batch=14, saves={"every_n_train_steps": 7})


def test_resuming_a_schedule_in_tokens_is_exactly_like_not_stopping(tmp_path: Path) -> None:
    _resume_and_compare(tmp_path, TOKENS, batch=10)
