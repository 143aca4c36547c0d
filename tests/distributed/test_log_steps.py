"""Loggers get the values of a resumed run at the steps of an uninterrupted one, whatever module it trains."""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from tests.kit.rank_trainers import join_lightning, rank_trainer
from tests.kit.ranks import run_ranks
from tests.kit.step_logger import StepLogger

NUM_BATCHES = 8


class _Logging(L.LightningModule):
    """A user's own, with one optimizer, or with two that it steps itself."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.moe = MoE(6, MoEConfig(num_experts=4, hidden_size=5, router=RouterConfig(top_k=2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.moe(batch)[0].square().mean()
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.moe(batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = [self.moe.experts, self.moe.router][: 1 if self.automatic_optimization else 2]
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


class _Save(L.Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def _logged(
    rank: int, world: int, manual: bool, interval: int, save: Path | None, load: Path | None
) -> list[int]:
    """The steps at which the loss was logged."""
    join_lightning(rank, world)
    torch.manual_seed(0)
    logger = StepLogger()
    trainer = rank_trainer(
        world,
        max_steps=-1,
        max_epochs=1,
        precision="32-true",
        gradient_clip_val=None,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[] if save is None else [_Save(save, batch=3)],
        val_check_interval=interval,
        num_sanity_val_steps=0,
    )
    data = DataLoader([torch.randn(3, 6) for _ in range(NUM_BATCHES)], batch_size=None)
    trainer.fit(_Logging(manual=manual), data, data, ckpt_path=load)
    return [step for step, names in logger.steps if "loss" in names]


@pytest.mark.parametrize("interval", [2, 3], ids=["due again", "not due"])
@pytest.mark.parametrize("manual", [False, True])
def test_a_run_resumed_from_a_validation_logs_at_the_steps_that_follow(
    tmp_path: Path, manual: bool, interval: int
) -> None:
    path = tmp_path / "x.ckpt"
    for steps in run_ranks(_logged, 2, manual, 2, path, None):
        assert steps == list(range(NUM_BATCHES))
    for steps in run_ranks(_logged, 2, manual, interval, None, path):
        assert steps == [4, 5, 6, 7]
