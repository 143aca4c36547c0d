"""Dispatch with fixed shapes: no host sync, at the price of dropping what overflows."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final, get_args

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_moe.config import MoEConfig
from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    between,
    check_choices,
    check_floats,
    check_ints,
    given,
)
from lightning_moe.nn.dispatch import Dispatched, Dispatcher
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
from lightning_moe.parallel.transports.all_to_all import AllToAllDispatcher
from lightning_moe.parallel.transports.exchange import Exchange
from lightning_moe.parallel.transports.transport import LargerBatches, Transport, larger_batch

# Wide enough for any use, and far from where numbers of slots overflow.
_CAPACITY_FACTOR: Final = between(1e-3, 1e4, "between 0.001 and 10000")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticDispatch(Transport):
    """Fixed shapes and no host sync; what overflows an expert's capacity is dropped in training.

    Attributes:
        capacity_factor: slots of an expert over its even share.
        overflow: who keeps a slot when there are too few: `position`, the earlier token; `weight`, the larger weight.
        warmup_tokens: the most tokens that a rank may have in a micro-batch; capacities and memory follow from it.
            None: batch_size x sequence_length of the training data, or else the largest first batch of any ep rank.
    """

    capacity_factor: float = 1.25
    overflow: Overflow = "position"
    warmup_tokens: int | None = None
    fixed_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check every option."""
        check_floats("strategy", _CAPACITY_FACTOR, capacity_factor=self.capacity_factor)
        check_choices("strategy", get_args(Overflow), overflow=self.overflow)
        check_ints("strategy", AT_LEAST_ONE, **given(warmup_tokens=self.warmup_tokens))

    def for_micro_batches(self, num_tokens: int) -> "StaticDispatch":
        """See `Transport.for_micro_batches`; `warmup_tokens` goes first."""
        return self if self.warmup_tokens else replace(self, warmup_tokens=num_tokens)

    def build(
        self, group: AxisGroup, layer: MoEConfig, larger: LargerBatches | None = None
    ) -> Dispatcher:
        """See `Transport.build`."""
        return StaticDispatcher(group, self, layer, larger)


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    """What `dispatch` leaves for `receive`; slots may not be read before the work is done."""

    rows_RW: Num[Tensor, "R W"]
    work: Work | None
    plan: CapacityPlan


class StaticDispatcher:
    """Every expert computes exactly ranks * capacity rows, whatever the routing.

    `capacity` is the even share of a source rank's token copies per expert, times `capacity_factor`, rounded up to 8.
    It is fixed by `warmup_tokens`, or by the largest first batch of any rank. A later batch may be smaller, not
    larger. Evaluation drops nothing: it uses `AllToAllDispatcher`.

    Args:
        group: the expert-parallel ranks.
        options: see `StaticDispatch`.
        layer: the layer's experts and choices per token.
        larger: is told of a batch that is too large; without it this rank raises at once.
    """

    def __init__(
        self,
        group: AxisGroup,
        options: StaticDispatch,
        layer: MoEConfig,
        larger: LargerBatches | None = None,
    ) -> None:
        self.group = group
        self.options = options
        self.num_experts = layer.num_experts
        self.top_k = layer.router.top_k
        self.max_tokens = options.warmup_tokens
        self.dropless = AllToAllDispatcher(group)
        self._larger = larger
        self._to_experts = Exchange(group=group, towards="experts")
        self._counts: dict[tuple[torch.device, int], Tensor] = {}

    def for_mode(self, *, training: bool) -> "StaticDispatcher | AllToAllDispatcher":
        """Dropless outside of training."""
        return self if training else self.dropless

    def warmup(self, max_tokens: int, device: torch.device) -> None:
        """Fix the capacity for micro-batches of up to `max_tokens` tokens; equal on all ranks of the group."""
        self.max_tokens = max_tokens
        self._constant_counts(self._capacity(), device)

    def dispatch(
        self,
        x_TW: Num[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> _InFlight:
        """Fill the slots and start to send them.

        Raises:
            RuntimeError: if this batch has more tokens than the capacity was made for; where `larger` is given, later.
        """
        if self.max_tokens is None:
            self._agree_on_size(len(x_TW), x_TW.device)
        assert self.max_tokens is not None
        if len(x_TW) > self.max_tokens:
            self._tell_larger(len(x_TW))
        plan = plan_with_capacity(
            ids_TK, weights_TK, num_experts, self._capacity(), self.options.overflow
        )
        rows_RW, work = self._to_experts.start(fill_slots(x_TW, plan))
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
        """Send the outputs back, then add up those of the copies that were kept, with their weights."""
        rows_RW = self._as_received(rows_RW)
        return combine_slots(self._to_experts.bring_back(rows_RW), weights_TK, back)

    def token_gradient(
        self, grad_RW: Float[Tensor, "R W"], back: CapacityPlan
    ) -> Float[Tensor, "T W"]:
        """See `Dispatcher.token_gradient`; copies that were dropped add nothing."""
        return sum_of_slots(self._to_experts.backward(self._as_received(grad_RW)), back)

    def _as_received(self, rows_RW: Tensor) -> Tensor:
        """(expert, source, slot) turned into (source, expert, slot)."""
        by_expert: Tensor = rows_RW.unflatten(0, (-1, self.group.size, self._capacity()))
        return by_expert.transpose(0, 1).flatten(0, 2)

    def _capacity(self) -> int:
        assert self.max_tokens is not None
        factor = self.options.capacity_factor
        return slots_per_expert(self.max_tokens, self.top_k, self.num_experts, factor)

    def _constant_counts(self, capacity: int, device: torch.device) -> Tensor:
        """(L,) rows of each local expert: the same tensor for the same capacity."""
        key = device, capacity
        if key not in self._counts:
            per_rank = self.num_experts // self.group.size
            self._counts[key] = torch.full((per_rank,), self.group.size * capacity, device=device)
        return self._counts[key]

    @outside_of_graphs  # ends the step
    def _tell_larger(self, num_tokens: int) -> None:
        assert self.max_tokens is not None
        if self._larger is None:
            raise larger_batch(num_tokens, self.max_tokens)
        self._larger.note(num_tokens, self.max_tokens)

    @outside_of_graphs  # done once, to fix the shapes
    def _agree_on_size(self, num_tokens: int, device: torch.device) -> None:
        largest = torch.tensor(num_tokens, device=device)
        self.group.all_reduce(largest, "max")
        self.warmup(int(largest.item()), device)
