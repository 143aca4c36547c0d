"""One training run, from checked options to a report."""

import time
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
from lightning_moe.cli.options import RunConfig, read_options
from lightning_moe.cli.quiet import quieten
from lightning_moe.cli.stopping import saves_at_sigterm
from lightning_moe.cli.summary import announce_compiling, print_facts, print_scores
from lightning_moe.cli.trainer import build_trainer, prepare_process, run_folder
from lightning_moe.config import to_mapping
from lightning_moe.data import TokenDataModule
from lightning_moe.module import MoEModule


def train(config: DictConfig) -> float:
    """Train as `config` says; returns the validation loss at the end (nats per token).

    Raises:
        FileNotFoundError: if a checkpoint or a data file does not exist.
        ValueError: if options clash or have no effect, or a file can't be used.
    """
    quieten()
    options = read_options(config, list(HydraConfig.get().overrides.task))
    checkpoint = _read_start(config, options)
    prepare_process(config)
    data = TokenDataModule(options.data)
    data.save_hyperparameters({"data": to_mapping(options.data)})
    data.setup("fit")
    rank_zero_only(print_facts)({"data": data.describe()})
    module = MoEModule(options.model, options.optim)
    if checkpoint is not None:
        check_fits(module, checkpoint, _start(config))
    validation = _LastValidation()
    trainer = build_trainer(config, [*_callbacks(config, options), validation])
    _keep_earlier_metrics(run_folder())
    announce_compiling(options.model.compile)
    seconds = _fit(trainer, module, data, config.ckpt_path)
    cross_entropy = validation.loss
    if validation.step != trainer.global_step:
        cross_entropy = float(trainer.validate(module, data, verbose=False)[0]["val/ce"])
    first_step = checkpoint["global_step"] if checkpoint and config.ckpt_path is not None else 0
    _report(
        trainer, data, cross_entropy, f"{trainer.global_step - first_step} steps in {seconds:.1f} s"
    )
    return cross_entropy


class _LastValidation(L.Callback):
    """Step and loss of the last validation: one at the last step need not be repeated."""

    def __init__(self) -> None:
        self.step = -1
        self.loss = float("nan")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember it."""
        if not trainer.sanity_checking:
            self.step, self.loss = trainer.global_step, float(trainer.callback_metrics["val/ce"])


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
    check_resumable(checkpoint, _start(config), options.optim, config.trainer.get("max_steps", -1))
    return checkpoint


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
        if not (isinstance(end, SIGTERMException) and saves_at_sigterm(trainer)):
            _report_interrupt(trainer)
        raise
    return time.perf_counter() - started


@rank_zero_only
def _report_interrupt(trainer: L.Trainer) -> None:
    facts = {
        "interrupted": f"at step {trainer.global_step}",
        "run folder": str(trainer.default_root_dir),
    }
    last = _last_checkpoint(trainer)
    facts["resume with"] = f"ckpt_path={last}" if last else "nothing: no checkpoint was saved yet"
    print_facts(facts)


@rank_zero_only
def _report(trainer: L.Trainer, data: TokenDataModule, cross_entropy: float, training: str) -> None:
    print_scores(data, cross_entropy, trainer.limit_val_batches)
    print_facts(
        {
            "run folder": str(trainer.default_root_dir),
            "checkpoint": str(_last_checkpoint(trainer) or "none: no callback saves one"),
            "training": training,
        }
    )


def _last_checkpoint(trainer: L.Trainer) -> Path | None:
    paths = [
        callback.path
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, LastCheckpoint)
    ]
    return next((path for path in paths if path.exists()), None)
