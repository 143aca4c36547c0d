"""Dispatch with fixed shapes: no host sync, at the price of dropping what overflows."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_moe.nn.dispatch import Dispatched
from lightning_moe.ops.capacity import (
    CapacityPlan,
    Overflow,
    combine_slots,
    fill_slots,
    plan_with_capacity,
    slots_per_expert,
    sum_of_slots,
)
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.parallel.collectives import AxisGroup, Work
from lightning_moe.parallel.transports.all_to_all import AllToAllDispatcher, Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    """Slots on their way; their plan stays here."""

    rows_RW: Num[Tensor, "R W"]
    work: Work | None
    plan: CapacityPlan


class StaticDispatcher:
    """Every expert computes exactly ranks * capacity rows, whatever the routing.

    `capacity` is the even share of a source rank's copies per expert, times `capacity_factor`, rounded up to 8. It
    is fixed by `warmup`, or by the largest first batch of any rank. A later batch may be smaller, not larger.
    Evaluation drops nothing: it takes the way of `AllToAllDispatcher`.

    Args:
        group: the expert-parallel ranks.
        num_experts: E.
        top_k: choices per token.
        capacity_factor: above 0; 1 has no slack at all.
        overflow: which copies of an overfull expert keep their slots; see `ops.capacity.plan_with_capacity`.
    """

    def __init__(
        self,
        group: AxisGroup,
        *,
        num_experts: int,
        top_k: int,
        capacity_factor: float = 1.25,
        overflow: Overflow = "position",
    ) -> None:
        self.group = group
        self._way = Exchange(group=group, gradient_factor=float(group.size))
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.overflow: Overflow = overflow
        self.max_tokens: int | None = None
        self.dropless = AllToAllDispatcher(group)
        self._counts: dict[tuple[torch.device, int], Tensor] = {}

    def for_mode(self, *, training: bool) -> "StaticDispatcher | AllToAllDispatcher":
        """Dropless outside of training."""
        return self if training else self.dropless

    def warmup(self, max_tokens: int, device: torch.device) -> None:
        """Fix the capacity for micro-batches of up to `max_tokens` tokens per rank; equal on all ranks."""
        self.max_tokens = max_tokens
        self._constant_counts(self._capacity(), device)

    def dispatch(
        self,
        x_TW: Num[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> _InFlight:
        """Fill the slots and set them going.

        Raises:
            RuntimeError: if this batch has more tokens than the capacity was made for.
        """
        if self.max_tokens is None:
            self._agree_on_size(len(x_TW), x_TW.device)
        assert self.max_tokens is not None
        if len(x_TW) > self.max_tokens:
            raise RuntimeError(
                f"a micro-batch of {len(x_TW)} tokens is larger than the {self.max_tokens} that "
                "strategy.dispatcher=static was set up for; begin with the largest batch, or use all_to_all"
            )
        plan = plan_with_capacity(ids_TK, weights_TK, num_experts, self._capacity(), self.overflow)
        rows_RW, work = self._way.start(fill_slots(x_TW, plan))
        return _InFlight(rows_RW=rows_RW, work=work, plan=plan)

    def receive(self, flight: _InFlight) -> Dispatched:
        """Wait, and turn (source, expert, slot) into (expert, source, slot)."""
        if flight.work is not None:
            flight.work.wait()
        size, capacity = self.group.size, self._capacity()
        by_source = flight.rows_RW.unflatten(0, (size, -1, capacity))
        return Dispatched(
            rows_RW=by_source.transpose(0, 1).flatten(0, 2).contiguous(),
            counts_L=self._constant_counts(capacity, flight.rows_RW.device),
            kept_TK=flight.plan.slot_TK < len(flight.rows_RW),
            back=flight.plan,
        )

    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], back: CapacityPlan
    ) -> Float[Tensor, "T W"]:
        """The way back, then the weighted sum of the copies that were kept."""
        rows_RW = self._as_received(rows_RW)
        return combine_slots(self._way.bring_back(rows_RW), weights_TK, back)

    def token_gradient(
        self, grad_RW: Float[Tensor, "R W"], back: CapacityPlan
    ) -> Float[Tensor, "T W"]:
        """The way back, times the number of ranks (see `Exchange`), then the sum over the copies that were kept."""
        grad_RW = self._way.bring_back(self._as_received(grad_RW))
        return sum_of_slots(grad_RW.mul_(self._way.gradient_factor), back)

    def _as_received(self, rows_RW: Tensor) -> Tensor:
        """(expert, source, slot) turned into (source, expert, slot)."""
        by_expert: Tensor = rows_RW.unflatten(0, (-1, self.group.size, self._capacity()))
        return by_expert.transpose(0, 1).flatten(0, 2)

    def _capacity(self) -> int:
        assert self.max_tokens is not None
        return slots_per_expert(self.max_tokens, self.top_k, self.num_experts, self.capacity_factor)

    def _constant_counts(self, capacity: int, device: torch.device) -> Tensor:
        """(L,) rows of each local expert, made once: making it each time would copy from the host."""
        key = device, capacity
        if key not in self._counts:
            per_rank = self.num_experts // self.group.size
            self._counts[key] = torch.full((per_rank,), self.group.size * capacity, device=device)
        return self._counts[key]

    @outside_of_graphs  # done once, to fix the shapes
    def _agree_on_size(self, num_tokens: int, device: torch.device) -> None:
        largest = torch.tensor(num_tokens, device=device)
        self.group.all_reduce(largest, "max")
        self.warmup(int(largest.item()), device)
