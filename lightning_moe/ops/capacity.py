"""Fixed numbers of rows per expert: which copies get one, and how rows are filled and summed.

Every expert has `capacity` slots for the tokens of one rank, so all shapes follow from sizes known on the host and
nothing waits for the device. Copies beyond the capacity are dropped: they contribute zero, and the weights of a
token's other copies stay as they are.

Source: GShard, arXiv:2006.16668; Switch Transformers, arXiv:2101.03961 (capacity factor).
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_moe.ops.autograd import Context
from lightning_moe.ops.permute import check_ids, dot_of_rows, sum_over_choices

Overflow = Literal["position", "weight"]

SLOT_MULTIPLE: Final = 8


def slots_per_expert(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Slots of each expert for the tokens of one rank: the even share times the factor, rounded up to 8."""
    even_share = num_tokens * top_k / num_experts
    return (
        max(1, math.ceil(math.ceil(capacity_factor * even_share) / SLOT_MULTIPLE)) * SLOT_MULTIPLE
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """Slots are numbered expert * capacity + place; their number itself stands for "none".

    Attributes:
        copy_R: copy (token * K + choice) in each slot; T * K where the slot is empty.
        slot_TK: slot of each copy; R where the copy is dropped.
        kept_E: copies that got a slot, per expert (int64).
    """

    copy_R: Int[Tensor, " R"]
    slot_TK: Int[Tensor, "T K"]
    kept_E: Int[Tensor, " E"]


pytree.register_dataclass(CapacityPlan)  # nodes of autograd keep its tensors


def plan_with_capacity(
    ids_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"],
    num_experts: int,
    capacity: int,
    overflow: Overflow,
) -> CapacityPlan:
    """Give slots to copies, first come first served.

    Args:
        ids_TK: chosen experts.
        weights_TK: their weights; only their order matters, and only for `weight`.
        num_experts: E.
        capacity: slots per expert.
        overflow: who comes first: `position`, the earlier token; `weight`, the larger weight, then the earlier token.

    Raises:
        RuntimeError: if an id is outside of [0, num_experts); see `check_on_device`.
    """
    ids_N = ids_TK.flatten()
    num_copies = ids_N.numel()
    if overflow == "weight":
        by_weight_N = weights_TK.detach().flatten().sort(descending=True, stable=True).indices
        order_N = by_weight_N[ids_N[by_weight_N].sort(stable=True).indices]
    else:
        order_N = ids_N.sort(stable=True).indices
    edges = torch.arange(num_experts + 1, device=ids_N.device)
    starts = torch.searchsorted(ids_N[order_N], edges)
    check_ids(starts, num_copies, num_experts)
    places_N = torch.arange(num_copies, device=ids_N.device) - starts[ids_N[order_N]]
    num_slots = num_experts * capacity
    slots_N = torch.where(places_N < capacity, ids_N[order_N] * capacity + places_N, num_slots)
    slot_TK = torch.empty_like(ids_N).scatter_(0, order_N, slots_N).view_as(ids_TK)
    # One slot more than there are takes all the dropped copies, and is cut off.
    copy_R = torch.full((num_slots + 1,), num_copies, device=ids_N.device)
    copy_R = copy_R.scatter_(0, slots_N, order_N)[:num_slots]
    return CapacityPlan(copy_R=copy_R, slot_TK=slot_TK, kept_E=starts.diff().clamp(max=capacity))


def fill_slots(x_TD: Num[Tensor, "T D"], plan: CapacityPlan) -> Num[Tensor, "R D"]:
    """The token of each slot's copy; zeros in empty slots."""
    rows_RD: Tensor = _Fill.apply(x_TD, plan.copy_R, plan.slot_TK)
    return rows_RD


def sum_of_slots(rows_RD: Float[Tensor, "R D"], plan: CapacityPlan) -> Float[Tensor, "T D"]:
    """Sum of the rows of each token, in at least float32, in the type of the rows: the backward of `fill_slots`."""
    return sum_over_choices(_gathered, rows_RD, plan.slot_TK, None)


def combine_slots(
    rows_RD: Float[Tensor, "R D"], weights_TK: Float[Tensor, "T K"], plan: CapacityPlan
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's rows, in at least float32; a dropped copy adds nothing."""
    y_TD: Tensor = _CombineSlots.apply(rows_RD, weights_TK, plan.copy_R, plan.slot_TK)
    return y_TD


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], and zeros where the index is the number of rows. `where`, since a row may hold NaN."""
    if not len(rows):
        return rows.new_zeros(len(index), *rows.shape[1:])
    taken = rows.index_select(0, index.clamp(max=len(rows) - 1))
    return torch.where((index < len(rows)).unsqueeze(-1), taken, 0)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x_TD: Tensor, copy_R: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        # An empty slot's copy, T * K, gives token T: no row.
        return _gathered(x_TD, copy_R // slot_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return sum_over_choices(_gathered, grad_RD, slot_TK, None), None, None


class _CombineSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows_RD: Tensor, weights_TK: Tensor, copy_R: Tensor, slot_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, copy_R, slot_TK)
        return sum_over_choices(_gathered, rows_RD, slot_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_TK, copy_R, slot_TK = ctx.saved_tensors
        grad_RD = _gathered(grad_TD, copy_R // slot_TK.shape[1])
        products_R = dot_of_rows(rows_RD, grad_RD)
        products_R1 = products_R.to(weights_TK.dtype).unsqueeze(-1)
        grad_weights_TK = _gathered(products_R1, slot_TK.flatten()).view_as(weights_TK)
        row_weights_R1 = _gathered(weights_TK.view(-1, 1), copy_R)
        return grad_RD.mul_(row_weights_R1.to(grad_RD.dtype)), grad_weights_TK, None, None
