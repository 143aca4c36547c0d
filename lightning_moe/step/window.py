"""The optimizer step of a module: open while micro-batches are added, closed by one division of its gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.ops.multiply import multiply_
from lightning_moe.ops.records import Routing
from lightning_moe.step.scope_state import ScopeState
from lightning_moe.step.sums import OpenStep, StepStatistics
from lightning_moe.step.unclosed import UNCLOSED, watch_steps


class StepWindow:
    """Collects the micro-batches of one optimizer step, outside of every recomputed region.

    `training_step` returns `window.add(loss_sum, num_tokens, records)`, a loss divided by a constant only. After the
    last backward of a step, `close_window` divides all gradients once, by the tokens of the whole step: the gradient
    is that of one big batch, whatever the accumulation, the number of ranks and the padding.
    A module that returns its own mean loss calls `record(records)` instead, and its gradients are left alone.

    `StepHooks` has a window and closes it; callbacks read what was closed (`closed_step`).

    Attributes:
        nominal_tokens: the constant, equal on all ranks; tokens of a full micro-batch keep losses near their mean.
        last: statistics of the last closed step.
        scopes: the counts that balance scopes keep between micro-batches and steps.
        observers: called with the records of every micro-batch as it is added; a copy of the window has none.
    """

    def __init__(self, nominal_tokens: int = 1) -> None:
        if nominal_tokens < 1:
            raise ValueError(f"nominal_tokens={nominal_tokens} must be at least 1")
        self.nominal_tokens = nominal_tokens
        self.last: StepStatistics | None = None
        self.scopes = ScopeState()
        self.observers: list[Callable[[Sequence[Routing]], None]] = []
        self._open = OpenStep()
        self._divided: StepStatistics | None = None
        self._is_watched = False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "observers": [], "_is_watched": False}

    def reset(self, *, resumes: bool = False) -> None:
        """Begin a fit: forget the open step and, unless this fit resumes another, the one before."""
        self._open, self._divided = OpenStep(), None
        self.scopes.begin_step()
        if not resumes:
            self.last = self.scopes.previous = None

    def state_dict(self) -> dict[str, list[list[int]] | None]:
        """The counts of the last closed step, which a resumed run needs where a balance scope is `lagged`."""
        previous = self.scopes.previous
        return {"previous": None if previous is None else [counts.tolist() for counts in previous]}

    def load_state_dict(self, state_dict: Mapping[str, list[list[int]] | None]) -> None:
        """Continue after the step whose counts `state_dict` has."""
        previous = state_dict["previous"]
        self.scopes.previous = (
            None if previous is None else tuple(torch.tensor(counts) for counts in previous)
        )

    @property
    def is_open(self) -> bool:
        """Whether anything was added since the last close."""
        return not self._open.is_empty

    @property
    def divides(self) -> bool:
        """Whether `close` will divide gradients."""
        return self._open.has_loss

    @property
    def requested(self) -> Sequence[Tensor]:
        """Per MoE layer, copies requested of each expert in the open step on this rank; empty before any records."""
        return self._open.requested

    def add(
        self,
        loss_sum: Float[Tensor, ""],
        num_tokens: Int[Tensor, ""],
        records: Sequence[Routing] = (),
        sums: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss for `training_step` to return.

        Args:
            loss_sum: sum over the valid tokens of this micro-batch.
            num_tokens: their number; 0 is fine.
            records: one per MoE layer, in the order of `module.modules()`.
            sums: further sums over the same tokens, to be logged as means.

        Raises:
            ValueError: if records are missing or come twice.
            RuntimeError: if the gradients of the step before were divided and nothing closed it. An optimizer that
                steps before the window is closed raises as well.
        """
        if self._divided is not None:
            raise RuntimeError(UNCLOSED)
        if loss_sum.requires_grad and not self._is_watched:
            watch_steps(self, loss_sum)
            self._is_watched = True
        self._add(num_tokens, records, sums or {})
        self._open.has_loss = True
        return loss_sum / self.nominal_tokens

    def record(self, records: Sequence[Routing]) -> None:
        """Count the routing of a micro-batch whose gradients must not be divided."""
        self._add(records[0].num_tokens if records else 0, records, {})

    def _add(
        self, num_tokens: Tensor | int, records: Sequence[Routing], sums: Mapping[str, Tensor]
    ) -> None:
        self.scopes.receive(records)
        for observe in self.observers:
            observe(records)
        self._open.add(num_tokens, records, sums)

    def divide_ahead(
        self, *, all_reduce_sum: Callable[[Tensor], Tensor], num_ranks: int, accumulate: int
    ) -> Tensor | None:
        """The factor by which `close` would multiply gradients, for a reducer that applies it on the way.

        To be called after the last forward of a step. `close` then leaves the gradients alone.

        Returns:
            A float64 scalar, or None when the step holds no loss of this window.
        """
        if not self._open.has_loss:
            return None
        self._divided = self._open.over_ranks(all_reduce_sum)
        return self._factor(self._divided, num_ranks, accumulate)

    def _factor(self, statistics: StepStatistics, num_ranks: int, accumulate: int) -> Tensor:
        tokens = statistics.num_tokens.clamp(min=1).double()
        return accumulate * num_ranks * self.nominal_tokens / tokens

    def close(
        self,
        *,
        all_reduce_sum: Callable[[Tensor], Tensor],
        num_ranks: int,
        accumulate: int,
        gradients: Iterable[Tensor],
    ) -> StepStatistics | None:
        """End the step: one reduction of all sums, and one division of the gradients in place.

        Does nothing when nothing is open.

        Args:
            all_reduce_sum: sum of a tensor over the ranks that share the loss.
            num_ranks: ranks over which the gradients were averaged.
            accumulate: the number by which the trainer divided each loss.
            gradients: what the optimizer will read, already reduced over ranks.

        Returns:
            Statistics of the step, or of the one before when nothing is open.
        """
        if not self.is_open:
            return self.last
        statistics = self._divided
        if statistics is None:
            statistics = self._open.over_ranks(all_reduce_sum)
            # By what was called, not by the tokens seen: every rank must take the same branch.
            if self._open.has_loss:
                multiply_(gradients, self._factor(statistics, num_ranks, accumulate))
        self.scopes.end_step(statistics.requested)
        self._open, self._divided = OpenStep(), None
        self.last = statistics
        return statistics


def divide_ahead(module: L.LightningModule) -> Tensor | None:
    """`StepWindow.divide_ahead` of `module.window`, if it has one."""
    window = window_of(module)
    return None if window is None else window.divide_ahead(**_ranks_of(module))


def close_window(module: L.LightningModule) -> StepStatistics | None:
    """Close the step of `module.window`, if it has one and it is open, and give its statistics.

    `StepHooks` calls this once per step. A module may call it before: after the last backward of a step, where
    it clips by hand in manual optimization.

    Raises:
        TypeError: if `module.window` exists and isn't a `StepWindow`.
    """
    window = window_of(module)
    return (
        None if window is None else window.close(**_ranks_of(module), gradients=_gradients(module))
    )


def closed_step(module: L.LightningModule) -> StepStatistics | None:
    """Statistics of the last closed step of `module.window`: in `on_before_optimizer_step`, of the step in progress.

    None where the module has no window, or closed no step yet.

    Raises:
        RuntimeError: if a step is open, so that nothing closed it before it is read.
        TypeError: if `module.window` exists and isn't a `StepWindow`.
    """
    window = window_of(module)
    if window is None:
        return None
    if window.is_open:
        raise RuntimeError(UNCLOSED)
    return window.last


def window_of(module: L.LightningModule) -> StepWindow | None:
    """`module.window`, or None if there is none.

    Raises:
        TypeError: if it isn't a `StepWindow`.
    """
    window = getattr(module, "window", None)
    if window is None or isinstance(window, StepWindow):
        return window
    raise TypeError(
        f"{type(module).__name__}.window must be a lightning_moe.StepWindow, not {type(window)}"
    )


def _ranks_of(module: L.LightningModule) -> dict[str, Any]:
    trainer = module.trainer
    return {
        "all_reduce_sum": lambda tensor: trainer.strategy.reduce(tensor, reduce_op="sum"),
        "num_ranks": trainer.world_size,
        "accumulate": trainer.accumulate_grad_batches if module.automatic_optimization else 1,
    }


def _gradients(module: L.LightningModule) -> list[Tensor]:
    """Every gradient that an optimizer will read, or that the module holds, once."""
    optimizers = module.trainer.optimizers
    owners = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    owners = list(dict.fromkeys([*owners, *module.parameters()]))
    return [p.grad for p in owners if p.grad is not None]
