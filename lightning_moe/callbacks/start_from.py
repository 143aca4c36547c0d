"""Starts a new run from the weights and moments of an old one."""

from pathlib import Path
from typing import Any

import lightning as L
from torch.optim import Optimizer

from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.strategy import ExpertParallelStrategy
from lightning_moe.strategy.hooks import there


class StartFrom(L.Callback):
    """Takes weights, router biases and optimizer moments from a checkpoint, and nothing else.

    Steps, learning rates, schedule and data start anew: annealing on other data with a decaying learning rate, for
    example. To go on with an interrupted run, use the Trainer's `ckpt_path` instead.

    Args:
        path: a checkpoint of a module with the same parameters: a file of Lightning's, or a folder of
            `ExpertParallelStrategy`, whatever the number of ranks.
        moments: whether to take the optimizer's moments as well.

    Raises:
        FileNotFoundError: at once, if there is nothing at the path.
        ValueError: at the start of fit, if it can't be read, doesn't fit the module or holds no optimizer.
    """

    def __init__(self, path: str | Path, *, moments: bool = True) -> None:
        self.path = Path(path)
        self.moments = moments
        if not self.path.exists():
            raise FileNotFoundError(
                f"init_from={path} is not a file or a folder; give the path of a checkpoint"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load them here: before this hook there are no optimizers, and Lightning doesn't know whether it resumes."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"init_from={self.path} starts a new run and ckpt_path={trainer.ckpt_path} goes on with an old one; "
                "give one of the two"
            )
        checkpoint = load_weights_into(trainer, self.path, "init_from", optimizers=self.moments)
        if not self.moments:
            return
        states = checkpoint.get("optimizer_states", [])
        self._check_optimizers(trainer.optimizers, states)
        if isinstance(trainer.strategy, ExpertParallelStrategy):
            there(trainer.strategy.checkpoints).load_moments(states)
        else:
            for optimizer, state in zip(trainer.optimizers, states, strict=True):
                own_groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": state["state"], "param_groups": own_groups})

    def _check_optimizers(self, optimizers: list[Optimizer], states: list[dict[str, Any]]) -> None:
        if len(states) != len(optimizers):
            raise ValueError(
                f"init_from={self.path} holds the state of {len(states)} optimizers, this run has {len(optimizers)}; "
                "use a full checkpoint, or moments=False"
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            sizes = [
                [len(group["params"]) for group in groups]
                for groups in (optimizer.param_groups, state["param_groups"])
            ]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"init_from={self.path} groups parameters as {sizes[1]}, this run as {sizes[0]}"
                )


def load_weights_into(
    trainer: L.Trainer, path: str | Path, option: str, *, optimizers: bool = False
) -> dict[str, Any]:
    """Weights of a checkpoint into the module in training or evaluation, once its strategy has set it up.

    Under `ExpertParallelStrategy` all ranks call it, and each reads its own part.

    Args:
        trainer: with a module.
        path: a file or a folder.
        option: what names it, for messages.
        optimizers: read their state as well.

    Returns:
        The checkpoint; under `ExpertParallelStrategy` this rank's part.

    Raises:
        ValueError: if it can't be read or holds another model.
    """
    ours = trainer.strategy if isinstance(trainer.strategy, ExpertParallelStrategy) else None
    try:
        # Neither runs code: a checkpoint is data.
        checkpoint = ours.load_checkpoint(path) if ours else read_whole(path, optimizers=optimizers)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option}={path} can't be read as a checkpoint; was it written to its end? ({error})"
        ) from error
    try:
        if ours:
            ours.load_model_state_dict(checkpoint)
        else:
            trainer.lightning_module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"{option}={path} holds another model: {error}") from error
    return checkpoint
