"""Checkpoints of runs: writes them, reads them with errors that name the option, and compares options."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from lightning_moe.checkpoint.whole import read_whole, read_without_tensors
from lightning_moe.cli.run_config import RunConfig
from lightning_moe.cli.runs import key_of
from lightning_moe.config import TransformerConfig, to_mapping
from lightning_moe.config.checks import AT_LEAST_ONE, check_ints, given
from lightning_moe.files import atomic_write
from lightning_moe.module import MoEModule
from lightning_moe.strategy import ExpertParallelStrategy

# Restored with the optimizer and its schedule, so that a resumed run never reads them from the options.
_RESTORED: Final = (
    "optim.lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.router_lr_scale",
    "optim.expert_lr_scale",
)


class LastCheckpoint(Checkpoint):
    """Keeps `last.ckpt` at the state of the last validation, and at the end of the run's last step.

    (`ModelCheckpoint(save_last=True)` leaves it where the best score was.)

    Args:
        folder: where it is written.
        every_n_steps: save after every so many optimizer steps as well; None saves at validations only.
    """

    def __init__(self, folder: str, every_n_steps: int | None = None) -> None:
        check_ints("callbacks.last", AT_LEAST_ONE, **given(every_n_steps=every_n_steps))
        self.path = Path(folder) / "last.ckpt"
        self.every_n_steps = every_n_steps
        self.saved_step = -1

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Save, if it is time to."""
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step != self.saved_step:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, unless the run ended with a validation."""
        if self.saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # Lightning says so as False, or as a number of batches.
        if not getattr(trainer, "fast_dev_run", False):
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved_step = trainer.global_step


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoint files that are whole or not there, as Lightning's own are not on a full disk."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None
    ) -> None:
        """Write the file.

        Raises:
            OSError: if it can't be written; what was there before is still there.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with atomic_write(Path(path)) as file:
                torch.save(checkpoint, file)
        # torch's writer of zip files knows no OSError.
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error.__context__ or error
            raise OSError(f"{path} can't be written ({reason}); is the disk full?") from error


def read_checkpoint(path: str, option: str) -> dict[str, Any]:
    """What a checkpoint says of itself: options, names and shapes; its weights are on the meta device.

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
        return read_without_tensors(path)
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


def check_fits(model: TransformerConfig, checkpoint: Mapping[str, Any], source: str) -> None:
    """Refuse a checkpoint whose weights are not those of a `MoEModule` of this model.

    Raises:
        ValueError: naming the first difference.
    """
    with torch.device("meta"):
        own = {name: tuple(value.shape) for name, value in MoEModule(model).state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            raise ValueError(
                f"{source} holds another model: {name} has shape {saved.get(name, 'none')} there and "
                f"{own.get(name, 'none')} here; use the model options it was trained with"
            )


def check_resumable(
    checkpoint: Mapping[str, Any],
    source: str,
    options: RunConfig,
    *,
    max_steps: int,
    words: Sequence[str],
) -> dict[str, str]:
    """Refuse to resume with other options than the checkpoint's, unless they are given and can change.

    Args:
        checkpoint: to resume from.
        source: its option, for messages.
        options: of this run.
        max_steps: of this run.
        words: the overrides of this run.

    Returns:
        What is given differently, by the option's name.

    Raises:
        ValueError: naming an option that can't change or was not given, or if nothing is left to do.
    """
    step = checkpoint.get("global_step", 0)
    if 0 <= max_steps <= step:
        raise ValueError(
            f"trainer.max_steps={max_steps} is reached: {source} was saved at step {step}; raise trainer.max_steps"
        )
    given_keys = [key_of(word) for word in words]
    changes: dict[str, str] = {}
    for section, saved_as, config in (
        ("model", "config", options.model),
        ("optim", "optim", options.optim),
        ("data", "data", options.data),
    ):
        saved = dict(_leaves(saved_section(checkpoint, saved_as) or {}, section))
        for name, own in _leaves(to_mapping(config), section):
            if name not in saved or saved[name] == own:
                continue
            if name in _RESTORED:
                raise ValueError(
                    f"{name}={own} has no effect when {source} is resumed, which restores {saved[name]}; "
                    f"set {name}={saved[name]}, or start a new run from it with init_from"
                )
            if not _is_given(name, given_keys):
                raise ValueError(
                    f"{name}={own} is not what {source} was trained with, {saved[name]}; give {name}={saved[name]} to "
                    f"go on as before, or {name}={own} to change it"
                )
            changes[name] = f"{own} instead of {saved[name]}"
    return changes


def _leaves(options: Mapping[Any, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Every option with its full name; lists are one value."""
    for key, value in options.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield name, list(value) if isinstance(value, tuple | list) else value


def _is_given(name: str, keys: Sequence[str]) -> bool:
    """Whether one of the keys sets this option: by itself, with its section, or by an experiment."""
    return any(key == "experiment" or f"{name}.".startswith(f"{key}.") for key in keys)
