"""`lightning-moe train`: one training run, from checked options to a report."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from lightning_moe.callbacks import ModelTable, StartFrom
from lightning_moe.cli.checkpoints import (
    LastCheckpoint,
    check_fits,
    check_resumable,
    read_checkpoint,
    resumable,
)
from lightning_moe.cli.process import INTERRUPTED, quieten
from lightning_moe.cli.run_config import RunConfig
from lightning_moe.cli.runs import run_folder, save_options
from lightning_moe.cli.summary import announce_compiling, print_facts, print_scores
from lightning_moe.cli.trainer import (
    build_trainer,
    prepare_process,
    saves_when_stopped,
    was_interrupted,
)
from lightning_moe.config import to_mapping
from lightning_moe.data import TokenDataModule
from lightning_moe.module import MoEModule


def run(config: DictConfig, options: RunConfig) -> float | None:
    """Train as `config` says; returns the validation loss at the end (nats per token), None without validation.

    Raises:
        FileNotFoundError: if a checkpoint or a data file does not exist.
        ValueError: if options clash or have no effect, or a file can't be used.
    """
    quieten()
    checkpoint = _read_start(config, options)
    prepare_process(config)
    data = TokenDataModule(options.data)
    data.save_hyperparameters({"data": to_mapping(options.data)})
    data.setup("fit")
    rank_zero_only(print_facts)({"data": data.describe()})
    module = MoEModule(options.model, options.optim)
    if checkpoint is not None:
        check_fits(options.model, checkpoint, _start(config))
    validation = _LastValidation()
    trainer = build_trainer(config, [*_callbacks(config, options), validation])
    save_options(config)
    _keep_earlier_metrics(run_folder())
    announce_compiling(options.model.compile)
    seconds = _fit(trainer, module, data, config.ckpt_path)
    cross_entropy = _final_loss(trainer, module, data, validation)
    first_step = checkpoint["global_step"] if checkpoint and config.ckpt_path is not None else 0
    _report(
        trainer, data, cross_entropy, f"{trainer.global_step - first_step} steps in {seconds:.1f} s"
    )
    return cross_entropy


class _LastValidation(L.Callback):
    """Step and loss of the last validation: one at the last step need not be repeated."""

    def __init__(self) -> None:
        self.step = -1
        self.loss: float | None = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember it."""
        if not trainer.sanity_checking and "val/ce" in trainer.callback_metrics:
            self.step, self.loss = trainer.global_step, float(trainer.callback_metrics["val/ce"])


def _final_loss(
    trainer: L.Trainer, module: MoEModule, data: TokenDataModule, validation: _LastValidation
) -> float | None:
    """The validation loss after the last step; None where options leave no batch to validate on."""
    if validation.step == trainer.global_step:
        return validation.loss
    if trainer.limit_val_batches == 0:
        return None
    with _logged_at_last_step(trainer):
        results = trainer.validate(module, data, verbose=False)
    return float(results[0]["val/ce"]) if results and "val/ce" in results[0] else None


@contextmanager
def _logged_at_last_step(trainer: L.Trainer) -> Iterator[None]:
    """After fit Lightning would log at the number of steps, which is the number of a step that was never made."""
    loop = trainer.fit_loop.epoch_loop
    done = loop._batches_that_stepped
    loop._batches_that_stepped = max(done - 1, 0)
    yield
    loop._batches_that_stepped = done


def _start(config: DictConfig) -> str:
    return (
        f"ckpt_path={config.ckpt_path}"
        if config.ckpt_path is not None
        else f"init_from={config.init_from}"
    )


def _read_start(config: DictConfig, options: RunConfig) -> dict[str, Any] | None:
    """The checkpoint to start from, refused before anything is built or written."""
    if config.init_from is not None:
        return read_checkpoint(config.init_from, "init_from")
    if config.ckpt_path is None:
        return None
    checkpoint = read_checkpoint(config.ckpt_path, "ckpt_path")
    words = list(HydraConfig.get().overrides.task)
    max_steps = config.trainer.get("max_steps", -1)
    changes = check_resumable(checkpoint, _start(config), options, max_steps=max_steps, words=words)
    _tell_changes(changes)
    return checkpoint


@rank_zero_only
def _tell_changes(changes: dict[str, str]) -> None:
    if changes:
        print_facts({f"given differently: {name}": change for name, change in changes.items()})


def _callbacks(config: DictConfig, options: RunConfig) -> list[L.Callback]:
    callbacks: list[L.Callback] = [ModelTable(options.model, options.data.sequence_length)]
    if config.init_from is not None:
        callbacks.append(StartFrom(config.init_from))
    return callbacks


@rank_zero_only
def _keep_earlier_metrics(folder: Path) -> None:
    """Lightning's logger would delete the metrics of the run that is resumed in its own folder."""
    path = folder / "metrics.csv"
    if path.exists():
        number = 1 + len(list(folder.glob("metrics_*.csv")))
        path.rename(folder / f"metrics_{number}.csv")


def _fit(
    trainer: L.Trainer, module: MoEModule, data: TokenDataModule, ckpt_path: str | None
) -> float:
    """Train; returns the seconds it took."""
    started = time.perf_counter()
    try:
        with resumable(trainer, ckpt_path) as path:
            trainer.fit(module, data, ckpt_path=path, weights_only=True)
    except SystemExit as end:
        # Lightning ends the process after Ctrl-C and after SIGTERM.
        if not (isinstance(end, SIGTERMException) and saves_when_stopped(trainer)):
            _report_interrupt(trainer)
        if was_interrupted(trainer):
            end.code = INTERRUPTED
        raise
    return time.perf_counter() - started


@rank_zero_only
def _report_interrupt(trainer: L.Trainer) -> None:
    facts = {
        "interrupted": f"at step {trainer.global_step}, without saving it",
        "run folder": str(trainer.default_root_dir),
    }
    last = _last_checkpoint(trainer)
    facts["resume with"] = (
        f"ckpt_path={last.path}, saved at step {last.saved_step}"
        if last
        else "nothing: no checkpoint was saved yet"
    )
    print_facts(facts)


@rank_zero_only
def _report(
    trainer: L.Trainer, data: TokenDataModule, cross_entropy: float | None, training: str
) -> None:
    print_scores(data, cross_entropy, trainer.limit_val_batches)
    last = _last_checkpoint(trainer)
    print_facts(
        {
            "run folder": str(trainer.default_root_dir),
            "checkpoint": str(last.path) if last else "none: no callback has saved one",
            "training": training,
        }
    )


def _last_checkpoint(trainer: L.Trainer) -> LastCheckpoint | None:
    callbacks = (one for one in trainer.checkpoint_callbacks if isinstance(one, LastCheckpoint))
    return next((callback for callback in callbacks if callback.path.exists()), None)
