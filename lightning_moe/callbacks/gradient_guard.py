"""Skips and counts steps with NaN or infinite gradients, and ends training after too many in a row."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_moe.parallel.layout import plain_name
from lightning_moe.precision import ReleasedParameter
from lightning_moe.step import closed_step


class NonFiniteGuard(L.Callback):
    """Logs the gradient norm before clipping, and skips steps where it isn't finite.

    A skipped step leaves weights and moments as they are; schedule and step count go on. `MoEModule` adds this
    callback by itself.

    Args:
        max_in_a_row: so many skipped steps in a row are allowed; one more raises.

    Raises:
        RuntimeError: when more steps in a row than that were skipped.
    """

    def __init__(self, max_in_a_row: int = 10) -> None:
        if max_in_a_row < 0:
            raise ValueError(f"max_in_a_row={max_in_a_row} must be at least 0")
        self.max_in_a_row = max_in_a_row
        self.num_skipped = 0
        self._in_a_row = 0

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the norm of the final gradients: accumulated, reduced, divided by tokens, not yet clipped."""
        closed_step(pl_module)  # raises if they are not divided
        # A wait for the device, one per step: whether to skip must be known. What is logged is on the host by then.
        norm = gradient_norm(trainer, optimizer).cpu()
        pl_module.log("train/grad_norm", norm)
        if norm.isfinite():
            self._in_a_row = 0
        else:
            self._skip(trainer, pl_module, optimizer, norm.item())
        pl_module.log("train/skipped_steps", torch.tensor(float(self.num_skipped)))

    def _skip(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
        norm: float,
    ) -> None:
        self.num_skipped += 1
        self._in_a_row += 1
        # An optimizer passes over parameters without a gradient: no update, no decay, no change of moments.
        optimizer.zero_grad(set_to_none=True)
        if self._in_a_row > self.max_in_a_row:
            names = _non_finite(trainer, pl_module)
            weights = (
                f"non-finite weights: {', '.join(names[:5])}" if names else "all weights are finite"
            )
            raise RuntimeError(
                f"{self._in_a_row} steps in a row had non-finite gradients (norm {norm} at step "
                f"{trainer.global_step}; {weights}); more than optim.max_skipped_steps={self.max_in_a_row}. "
                "Lower optim.lr, warm up longer, set trainer.gradient_clip_val, or look at the data of these steps"
            )

    def state_dict(self) -> dict[str, Any]:
        """Numbers of skipped steps: in all, and in a row."""
        return {"num_skipped": self.num_skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from saved numbers."""
        self.num_skipped, self._in_a_row = state_dict["num_skipped"], state_dict["in_a_row"]


def _non_finite(trainer: L.Trainer, module: L.LightningModule) -> list[str]:
    """Names of weights that are not finite; of a released weight, this rank's part of its master is looked at."""
    sharded = getattr(trainer.strategy, "sharded", None)
    return [
        name
        for name, parameter in module.named_parameters()
        if not (
            sharded.targets[plain_name(name)]
            if sharded is not None and isinstance(parameter, ReleasedParameter)
            else parameter
        )
        .isfinite()
        .all()
    ]


def gradient_norm(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> Tensor:
    """2-norm of all gradients, equal on all ranks, so that all of them skip a step or none does."""
    # A rank of `ExpertParallelStrategy` holds a part of the gradients; elsewhere all ranks hold all of them.
    over_ranks = getattr(trainer.strategy, "gradient_norm", None)
    if over_ranks is not None:
        norm: Tensor = over_ranks(optimizer)
        return norm
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
