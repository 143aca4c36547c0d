"""The micro-batches of one optimizer step: what they add up to, and the one division by their tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.ops.multiply import multiply_
from lightning_moe.ops.records import Routing
from lightning_moe.step.look_ahead import refuse_unforeseen
from lightning_moe.step.unclosed import UNCLOSED, watch_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """One optimizer step, summed over its micro-batches and all ranks.

    Attributes:
        num_tokens: valid tokens (int64).
        requested: per MoE layer, token copies asked of each expert (int64).
        sums: the named sums given to `StepWindow.add` (float64); divide by `num_tokens` for means.
    """

    num_tokens: Int[Tensor, ""]
    # Not " E": layers may differ in their number of experts.
    requested: tuple[Int[Tensor, " _"], ...]
    sums: dict[str, Float[Tensor, ""]]

    def means(self) -> dict[str, Tensor]:
        """The sums per token; 0 for a step without valid tokens."""
        return {name: value / self.num_tokens.clamp(min=1) for name, value in self.sums.items()}


class StepWindow:
    """Collects the micro-batches of one optimizer step outside of every recomputed region.

    `training_step` returns `window.add(loss_sum, num_tokens, records)`, a loss divided by a constant only. Before
    clipping and the step, `close_window` divides all gradients once, by the tokens of the whole step: the
    gradient is that of one big batch, whatever the accumulation, the number of ranks and the padding.
    A module that returns its own mean loss calls `record(records)` instead and its gradients are left alone.
    `MoEModule`, `ExpertParallelStrategy` and the callbacks that read counts close the window. Other modules call
    `close_window(self)` in `on_before_optimizer_step`: callbacks come and go (a learning-rate finder takes all out).

    Attributes:
        nominal_tokens: the constant, equal on all ranks; tokens of a full micro-batch keep losses near their mean.
        last: statistics of the last closed step.
        observers: called with the records of every micro-batch as it is added; a copy of the window has none.
        previous: per MoE layer, the token copies asked of each expert in the last closed step, over all ranks; what
            the balance scope `lagged` uses. None before the first step of a fit that doesn't resume another.
        foreseen: the same for the step in progress, by number of the layer, where the balance scope is `exact`.
        opened_at: the Trainer's `global_step` when `step_router_losses` was last called in this step.
        awaits: how many records of that call have still to be added, where a balance scope counts on them.
    """

    def __init__(self, nominal_tokens: int = 1) -> None:
        if nominal_tokens < 1:
            raise ValueError(f"nominal_tokens={nominal_tokens} must be at least 1")
        self.nominal_tokens = nominal_tokens
        self.last: StepStatistics | None = None
        self.observers: list[Callable[[Sequence[Routing]], None]] = []
        self.previous: tuple[Tensor, ...] | None = None
        self._resumes = False
        self._is_watched = False
        self.reset()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "observers": [], "_is_watched": False}

    def reset(self) -> None:
        """Begin a fit: forget the open step, and the one before unless `load_state_dict` has just brought it."""
        if not self._resumes:
            self.previous = None
        self._resumes = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_losses = 0
        self._num_records = 0
        self._num_tokens: Tensor | None = None
        self._requested: list[Tensor] = []
        self._counted_last: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._divided: StepStatistics | None = None
        self.foreseen: dict[int, Tensor] = {}
        self.opened_at: int | None = None
        self.awaits = 0

    def state_dict(self) -> dict[str, list[list[int]] | None]:
        """What a resumed run needs where a balance scope is `lagged`: the counts of the last closed step."""
        previous = self.previous
        return {"previous": None if previous is None else [counts.tolist() for counts in previous]}

    def load_state_dict(self, state_dict: Mapping[str, list[list[int]] | None]) -> None:
        """Go on after the step that `state_dict` saw closed."""
        previous = state_dict["previous"]
        self.previous = (
            None if previous is None else tuple(torch.tensor(counts) for counts in previous)
        )
        self._resumes = True

    def requested_so_far(self, layer: int) -> Tensor:
        """Copies asked of each expert in the open step on this rank; a scalar 0 when nothing was added yet."""
        return self._requested[layer] if self._requested else torch.zeros((), dtype=torch.int64)

    def requested_before(self, layer: int, *, like: Tensor) -> Tensor:
        """Copies asked of each expert in the step before, on the device of `like`.

        Raises:
            ValueError: if that step had other layers.
        """
        previous = self.previous or ()
        if layer >= len(previous) or previous[layer].shape != like.shape:
            raise ValueError(
                f"the optimizer step before had counts of shapes {[tuple(counts.shape) for counts in previous]}, and "
                f"MoE layer {layer} has {tuple(like.shape)}; add the records of all MoE layers to the window, and "
                "resume from a checkpoint of the same model"
            )
        return previous[layer].to(like.device)

    @property
    def is_open(self) -> bool:
        """Whether anything was added since the last close."""
        return self._num_losses + self._num_records > 0

    @property
    def divides(self) -> bool:
        """Whether `close` will divide gradients."""
        return self._num_losses > 0

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
            num_tokens: how many those are; 0 is fine.
            records: one per MoE layer, in the order of `module.modules()`.
            sums: further sums over the same tokens, to be logged as means.

        Raises:
            ValueError: if records are missing or come twice.
            RuntimeError: not here, but in an optimizer that then steps before the window was closed.
        """
        if loss_sum.requires_grad and not self._is_watched:
            watch_steps(self, loss_sum)
            self._is_watched = True
        self._num_losses += 1
        self._num_tokens = num_tokens if self._num_tokens is None else self._num_tokens + num_tokens
        for name, value in (sums or {}).items():
            wide = value.detach().to(torch.float64)
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        self._count(records)
        return loss_sum / self.nominal_tokens

    def record(self, records: Sequence[Routing]) -> None:
        """Count the routing of a micro-batch whose loss is the module's own affair."""
        num_tokens = records[0].num_tokens if records else None
        if num_tokens is not None:
            self._num_tokens = (
                num_tokens if self._num_tokens is None else self._num_tokens + num_tokens
            )
        self._num_records += 1
        self._count(records)

    def _count(self, records: Sequence[Routing]) -> None:
        if self.awaits and len(records) != self.awaits:
            raise ValueError(
                f"step_router_losses was called with {self.awaits} routing records, and {len(records)} were added to "
                "the window; its balance scopes need them all: `self.window.add(loss_sum, num_tokens, records)`, or "
                "`self.window.record(records)`"
            )
        self.awaits = 0
        for observe in self.observers:
            observe(records)
        requested = [record.requested_E for record in records]
        if requested:
            if requested[0] is self._counted_last:
                raise ValueError(
                    "the same routing records came to the window twice in a row, which would count their tokens twice; "
                    "call `self.window.add(loss_sum, num_tokens, records)` or `self.window.record(records)`, not both"
                )
            self._counted_last = requested[0]
        if not self._requested:
            self._requested = requested
            return
        if len(requested) != len(self._requested):
            raise ValueError(
                f"{len(requested)} routing records after {len(self._requested)} in the same optimizer step; "
                "pass one per MoE layer each time, in the same order"
            )
        self._requested = [
            total + counts for total, counts in zip(self._requested, requested, strict=True)
        ]

    def divide_ahead(
        self, *, all_reduce_sum: Callable[[Tensor], Tensor], num_ranks: int, accumulate: int
    ) -> Tensor | None:
        """The factor that `close` would put on gradients, for a reducer that applies it on the way.

        To be called after the last forward of a step. `close` then leaves the gradients alone.

        Returns:
            A float64 scalar, or None when the step holds no loss of this window.
        """
        if not self._num_losses:
            return None
        self._divided = self._reduced(all_reduce_sum)
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

        Does nothing when nothing is open, so it may be called from several places.

        Args:
            all_reduce_sum: sum of a tensor over the ranks that share the loss.
            num_ranks: ranks over which the gradients were averaged.
            accumulate: the number by which the trainer divided each loss.
            gradients: what the optimizer will read, already reduced over ranks.
        """
        if not self.is_open:
            return self.last
        statistics = self._divided
        if statistics is None:
            statistics = self._reduced(all_reduce_sum)
            # By what was called, not by the tokens seen: every rank must take the same branch.
            if self._num_losses:
                multiply_(gradients, self._factor(statistics, num_ranks, accumulate))
        refuse_unforeseen(self.foreseen, statistics.requested)
        self._resumes = False
        self._begin_step()
        self.last, self.previous = statistics, statistics.requested
        return statistics

    def _reduced(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> StepStatistics:
        """Everything in one message; float64 holds counts exactly up to 2^53."""
        num_tokens = (
            self._num_tokens if self._num_tokens is not None else torch.zeros((), dtype=torch.int64)
        )
        names = sorted(self._sums)
        parts = [
            num_tokens.view(1),
            *self._requested,
            *(self._sums[name].view(1) for name in names),
        ]
        sizes = [part.numel() for part in parts]
        total = all_reduce_sum(torch.cat([part.to(torch.float64) for part in parts]))
        tokens, *rest = total.split(sizes)
        counts, sums = rest[: len(self._requested)], rest[len(self._requested) :]
        return StepStatistics(
            num_tokens=tokens.squeeze(0).to(torch.int64),
            requested=tuple(count.to(torch.int64) for count in counts),
            sums={name: value.squeeze(0) for name, value in zip(names, sums, strict=True)},
        )


def divide_ahead(module: L.LightningModule) -> Tensor | None:
    """`StepWindow.divide_ahead` of `module.window`, if it has one."""
    window = window_of(module)
    return None if window is None else window.divide_ahead(**_ranks_of(module))


def close_window(module: L.LightningModule) -> StepStatistics | None:
    """Close the step of `module.window`, if it has one and it is open, and give its statistics.

    Called by `MoEModule.optimizer_step` and by every callback that reads the statistics, whichever comes first.

    Raises:
        TypeError: if `module.window` exists and isn't a `StepWindow`.
    """
    window = window_of(module)
    return (
        None if window is None else window.close(**_ranks_of(module), gradients=_gradients(module))
    )


def refuse_unclosed(module: L.LightningModule, *, counts_matter: bool = True) -> None:
    """Note at which step `module.window` is opened, and refuse to go on with it in a later one.

    Args:
        module: in the middle of a `training_step`, or at its end.
        counts_matter: whether records alone, which ask for no division, have to be closed as well.

    Raises:
        RuntimeError: if an optimizer step went by while the window stayed open.
    """
    window = window_of(module)
    if window is None:
        return
    step = module.trainer.global_step
    must_close = window.divides or (counts_matter and window.is_open)
    if must_close and window.opened_at not in (None, step):
        raise RuntimeError(UNCLOSED)
    window.opened_at = step


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
