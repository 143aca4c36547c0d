"""A new run from the weights and moments of an old one."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer


class StartFrom(L.Callback):
    """Takes weights, router biases and optimizer moments from a checkpoint, and nothing else.

    Steps, learning rates, schedule and data start anew: annealing on other data with a decaying learning rate, for
    example. To go on with an interrupted run, use the Trainer's `ckpt_path` instead.

    Args:
        path: a Lightning checkpoint of a module with the same parameters.
        moments: whether to take the optimizer's moments as well.

    Raises:
        FileNotFoundError: at once, if there is no such file.
        ValueError: at the start of fit, if the file can't be read, doesn't fit the module or holds no optimizer.
    """

    def __init__(self, path: str | Path, *, moments: bool = True) -> None:
        self.path = Path(path)
        self.moments = moments
        if not self.path.is_file():
            raise FileNotFoundError(
                f"init_from={path} is not a file; give the path of a .ckpt file"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first hook at which optimizers exist, and at which Lightning knows whether it resumes."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"init_from={self.path} starts a new run and ckpt_path={trainer.ckpt_path} goes on with an old one; "
                "give one of the two"
            )
        checkpoint = self._read()
        try:
            pl_module.load_state_dict(checkpoint["state_dict"])
        except RuntimeError as error:
            raise ValueError(f"init_from={self.path} holds another model: {error}") from error
        if self.moments:
            self._load_moments(trainer.optimizers, checkpoint.get("optimizer_states", []))

    def _read(self) -> dict[str, Any]:
        try:
            # weights_only: a checkpoint is data, and must not run code.
            checkpoint: object = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"init_from={self.path} can't be read as a checkpoint; was it written to its end? ({error})"
            ) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(
                f"init_from={self.path} is no Lightning checkpoint: it has no state_dict"
            )
        return checkpoint

    def _load_moments(self, optimizers: list[Optimizer], states: list[dict[str, Any]]) -> None:
        if len(states) != len(optimizers):
            raise ValueError(
                f"init_from={self.path} holds the state of {len(states)} optimizers, this run has {len(optimizers)}; "
                "use a full checkpoint, or moments=False"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            own_groups = optimizer.state_dict()["param_groups"]
            sizes = [
                [len(group["params"]) for group in groups]
                for groups in (own_groups, state["param_groups"])
            ]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"init_from={self.path} groups parameters as {sizes[1]}, this run as {sizes[0]}"
                )
            optimizer.load_state_dict({"state": state["state"], "param_groups": own_groups})
