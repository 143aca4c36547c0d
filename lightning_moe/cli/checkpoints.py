"""Checkpoints of runs: writing the last one, reading one with an error that names the file."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.config import OptimConfig, to_mapping
from lightning_moe.strategy import ExpertParallelStrategy

# Restored with the optimizer and its schedule, so that a resumed run never reads them from the options.
_RESTORED_OPTIM: Final = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "router_lr_scale",
    "expert_lr_scale",
)


class LastCheckpoint(Checkpoint):
    """Keeps `last.ckpt` at the state of the last validation, and at the end of the run's last step.

    (`ModelCheckpoint(save_last=True)` leaves it where the best score was.)

    Args:
        folder: where it is written.
    """

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "last.ckpt"
        self._saved_step = -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, unless the run ended with a validation."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = trainer.global_step


def read_checkpoint(path: str, option: str) -> dict[str, Any]:
    """The content of a checkpoint, on one process.

    Args:
        path: a file written by the Trainer, or a folder written by `ExpertParallelStrategy`.
        option: the option that names it, for messages.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it is damaged or something else.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{option}={path} does not exist; give the path of a checkpoint")
    try:
        return read_whole(path)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{option}={path} can't be read as a checkpoint; is it truncated? ({reason})"
        ) from error


@contextmanager
def resumable(trainer: L.Trainer, path: str | None) -> Iterator[str | None]:
    """The checkpoint in the form that the trainer's strategy reads.

    Raises:
        ValueError: if a folder of several ranks is to be resumed by several ranks of another strategy.
    """
    readable = isinstance(trainer.strategy, ExpertParallelStrategy)
    if path is None or readable or not Path(path).is_dir():
        yield path
        return
    if trainer.world_size > 1:
        raise ValueError(
            f"ckpt_path={path} is a folder, which only ExpertParallelStrategy reads on several ranks; "
            "set strategy=expert_parallel"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(path).name
        torch.save(read_whole(path), file)
        yield str(file)


def saved_section(checkpoint: Mapping[str, Any], name: str) -> Mapping[str, object] | None:
    """The options `config`, `optim` or `data` that a checkpoint was trained with; None if it doesn't say."""
    key = "datamodule_hyper_parameters" if name == "data" else "hyper_parameters"
    section = checkpoint.get(key, {}).get(name)
    return section if isinstance(section, Mapping) else None


def check_fits(module: L.LightningModule, checkpoint: Mapping[str, Any], source: str) -> None:
    """Refuse a checkpoint whose weights are not those of `module`.

    Raises:
        ValueError: naming the first difference.
    """
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            raise ValueError(
                f"{source} holds another model: {name} has shape {saved.get(name, 'none')} there and "
                f"{own.get(name, 'none')} here; use the model options it was trained with"
            )


def check_resumable(
    checkpoint: Mapping[str, Any], source: str, optim: OptimConfig, max_steps: int
) -> None:
    """Refuse to resume where options would silently be those of the checkpoint, or nothing is left to do.

    Raises:
        ValueError: naming the option.
    """
    step = checkpoint.get("global_step", 0)
    if 0 <= max_steps <= step:
        raise ValueError(
            f"trainer.max_steps={max_steps} is reached: {source} was saved at step {step}; raise trainer.max_steps"
        )
    saved, own = saved_section(checkpoint, "optim") or {}, to_mapping(optim)
    for name in _RESTORED_OPTIM:
        if name in saved and saved[name] != own[name]:
            raise ValueError(
                f"optim.{name}={own[name]} has no effect when {source} is resumed, which restores {saved[name]}; "
                f"set optim.{name}={saved[name]}, or start a new run from it with init_from"
            )
