"""Sums over the micro-batches of an optimizer step: on this rank while it is open, over all ranks once closed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.ops.read_back import ReadBack
from lightning_moe.ops.records import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """A closed optimizer step, summed over its micro-batches and all ranks.

    Attributes:
        num_tokens: valid tokens (int64).
        requested: per MoE layer, token copies requested of each expert (int64).
        sums: the named sums given to `StepWindow.add` (float64); divide by `num_tokens` for means.
        read_back: all of it in one vector, on its way to the host; None where it is there.
    """

    num_tokens: Int[Tensor, ""]
    # Not " E": layers may differ in their number of experts.
    requested: tuple[Int[Tensor, " _"], ...]
    sums: dict[str, Float[Tensor, ""]]
    read_back: ReadBack | None = None

    def means(self) -> dict[str, Tensor]:
        """The sums per token; 0 for a step without valid tokens."""
        return {name: value / self.num_tokens.clamp(min=1) for name, value in self.sums.items()}

    def on_host(self) -> "StepStatistics":
        """The same in host memory, where numbers can be read and logged without waiting for a device."""
        if self.read_back is None:
            return self
        num_experts = [len(counts) for counts in self.requested]
        return _statistics(self.read_back.values(), num_experts, list(self.sums))


class OpenStep:
    """The micro-batches of an open optimizer step, summed on this rank.

    Attributes:
        is_empty: whether no micro-batch was added.
        has_loss: whether a loss was added, so that gradients are to be divided by the step's tokens.
        requested: per MoE layer, token copies requested of each expert; empty before the first routing records.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self.has_loss = False
        self.requested: list[Tensor] = []
        self._num_tokens = torch.zeros((), dtype=torch.int64)
        self._sums: dict[str, Tensor] = {}
        self._last_counted: Tensor | None = None

    def add(
        self, num_tokens: Tensor | int, records: Sequence[Routing], sums: Mapping[str, Tensor]
    ) -> None:
        """Add one micro-batch.

        Raises:
            ValueError: if it has more or fewer routing records than the one before, or the same ones.
        """
        self.is_empty = False
        self._num_tokens = self._num_tokens + num_tokens
        for name, value in sums.items():
            wide = value.detach().to(torch.float64)
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        requested = [record.requested_E for record in records]
        if requested:
            if requested[0] is self._last_counted:
                raise ValueError(
                    "the same routing records came to the window twice in a row, which would count their tokens twice; "
                    "call `self.window.add(loss_sum, num_tokens, records)` or `self.window.record(records)`, not both"
                )
            self._last_counted = requested[0]
        if not self.requested:
            self.requested = requested
            return
        if len(requested) != len(self.requested):
            raise ValueError(
                f"{len(requested)} routing records after {len(self.requested)} in the same optimizer step; "
                "pass one per MoE layer each time, in the same order"
            )
        self.requested = [
            total + counts for total, counts in zip(self.requested, requested, strict=True)
        ]

    def over_ranks(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> StepStatistics:
        """The sums over all ranks, from one message; its float64 holds counts exactly up to 2^53."""
        names = sorted(self._sums)
        parts = [
            self._num_tokens.view(1),
            *self.requested,
            *(self._sums[name].view(1) for name in names),
        ]
        total = all_reduce_sum(torch.cat([part.to(torch.float64) for part in parts]))
        num_experts = [len(counts) for counts in self.requested]
        # Steps are logged, so the copy begins at once: before the last backward, where that divides gradients.
        return replace(_statistics(total, num_experts, names), read_back=ReadBack(total))


def _statistics(total: Tensor, num_experts: list[int], names: list[str]) -> StepStatistics:
    tokens, *rest = total.split([1, *num_experts, *([1] * len(names))])
    counts, sums = rest[: len(num_experts)], rest[len(num_experts) :]
    return StepStatistics(
        num_tokens=tokens.squeeze(0).to(torch.int64),
        requested=tuple(count.to(torch.int64) for count in counts),
        sums={name: value.squeeze(0) for name, value in zip(names, sums, strict=True)},
    )
