"""The hooks of a LightningModule that close, reset, save and load its optimizer steps."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_moe.step.look_ahead import keep_position
from lightning_moe.step.window import StepWindow, close_window, window_of


class StepHooks(L.LightningModule):
    """A mixin for LightningModules that add to `self.window` in `training_step`; `MoEModule` has it.

        class Mine(StepHooks, L.LightningModule):
            def training_step(self, batch, batch_idx):
                ...
                return self.window.add(loss_sum, num_tokens, records)

    Steps are closed before callbacks and clipping see their gradients, in automatic and manual optimization and under
    any strategy; a fit begins without what an interrupted one left open; a resumed fit knows the step before.

    A module that can't inherit creates `self.window = StepWindow()`, calls `begin_steps(self)` in `on_train_start`, and
    keeps `self.window.state_dict()` in its checkpoints where a balance scope is `lagged`.

    Attributes:
        window: the optimizer step in progress, and the last one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window = StepWindow()

    def on_train_start(self) -> None:
        """Have steps closed, and forget what an earlier, interrupted fit left open."""
        super().on_train_start()
        begin_steps(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the last closed step."""
        super().on_save_checkpoint(checkpoint)
        checkpoint.setdefault("lightning_moe", {})["window"] = self.window.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the last closed step, where the checkpoint has one."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lightning_moe", {})
        if "window" in saved:
            self.window.load_state_dict(saved["window"])


def begin_steps(module: L.LightningModule) -> None:
    """Begin the optimizer steps of a fit: have them closed, and forget what an earlier fit left open."""
    close_steps(module.trainer)
    if (window := window_of(module)) is not None:
        window.reset(resumes=module.trainer.global_step > 0)


def close_steps(trainer: L.Trainer) -> None:
    """Have every optimizer step of the Trainer's module closed once its last backward is done.

    Lightning calls `on_before_optimizer_step` of the callbacks before that of the module. So a callback closes, ahead
    of all others that have this hook.
    """
    # The Trainer's callback connector gives it that attribute.
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, StepCloser) for callback in callbacks):
        return
    has_hook = (is_overridden("on_before_optimizer_step", c, L.Callback) for c in callbacks)
    # Not always at 0: Lightning's learning-rate finder takes its results from the first callback, which has no such
    # hook. A new list: the old one may be iterated over at this moment.
    place = next((i for i, has in enumerate(has_hook) if has), len(callbacks))
    trainer.callbacks = [*callbacks[:place], StepCloser(), *callbacks[place:]]  # type: ignore[attr-defined]


class StepCloser(L.Callback):
    """Closes the optimizer steps of a module; see `close_steps`."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Divide the gradients of the step by its tokens; several optimizers of one step divide once."""
        close_window(pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint within a step must not skip batches that the scope `exact` has seen ahead."""
        keep_position(trainer, checkpoint)
