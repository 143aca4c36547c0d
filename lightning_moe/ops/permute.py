"""Sorting of token copies by expert, and back; both directions and both backwards use gathers only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_moe.ops.autograd import Context
from lightning_moe.ops.checks import check_on_device
from lightning_moe.ops.dtypes import at_least_float32

# Parts in which wide copies are made: small next to what is kept for backward, few enough for a GPU's launches.
_NUM_PARTS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each token copy goes.

    Attributes:
        order_N: copy (token * K + choice) that stands at each sorted row.
        inverse_TK: sorted row of each copy.
        counts_E: rows of each expert (int64).
    """

    order_N: Int[Tensor, " N"]
    inverse_TK: Int[Tensor, "T K"]
    counts_E: Int[Tensor, " E"]


pytree.register_dataclass(Plan)  # nodes of autograd keep its tensors


def plan_by_expert(expert_ids_TK: Int[Tensor, "T K"], num_experts: int) -> Plan:
    """Sort token copies by expert; within one expert, tokens keep their order.

    Raises:
        ValueError: if `num_experts` is not positive.
        RuntimeError: if an id is outside of [0, num_experts); see `check_on_device`.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    # Narrow keys sort up to three times faster on a CPU.
    key_type = torch.int16 if num_experts < 2**15 else torch.int64
    # Clamped first: what wraps around in a narrow type could become the id of an expert.
    keys_N = expert_ids_TK.flatten().clamp(-1, num_experts).to(key_type)
    sorted_ids_N, order_N = keys_N.sort(stable=True)
    rows_N = torch.arange(order_N.numel(), device=order_N.device)
    inverse_TK = torch.empty_like(order_N).scatter_(0, order_N, rows_N).view_as(expert_ids_TK)
    edges = torch.arange(num_experts + 1, device=order_N.device, dtype=key_type)
    starts = torch.searchsorted(sorted_ids_N, edges)
    check_ids(starts, order_N.numel(), num_experts)
    return Plan(order_N=order_N, inverse_TK=inverse_TK, counts_E=starts.diff())


def check_ids(starts: Int[Tensor, " _"], num_ids: int, num_experts: int) -> None:
    """Fail if not all of `num_ids` sorted ids are those of experts, which start at `starts`; the last is the end.

    Raises:
        RuntimeError: see `check_on_device`.
    """
    check_on_device(
        starts[-1] - starts[0] == num_ids,
        f"an id of an expert is outside of [0, {num_experts}); leave out tokens that go nowhere",
    )


def permute(x_TD: Num[Tensor, "T D"], plan: Plan) -> Num[Tensor, "N D"]:
    """One row per token copy, in the order of `plan`."""
    rows_ND: Tensor = _Permute.apply(x_TD, plan.order_N, plan.inverse_TK)
    return rows_ND


def reorder(
    rows_RD: Num[Tensor, "R D"], order_R: Int[Tensor, " R"], inverse_R: Int[Tensor, " R"]
) -> Num[Tensor, "R D"]:
    """Rows in another order: row i of the result is row order[i]; `inverse_R` undoes `order_R`."""
    reordered_RD: Tensor = _Reorder.apply(rows_RD, order_R, inverse_R)
    return reordered_RD


def combine(
    rows_ND: Float[Tensor, "N D"], weights_TK: Float[Tensor, "T K"], plan: Plan
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's rows, accumulated in at least the weights' precision, in the rows' type."""
    y_TD: Tensor = _Combine.apply(rows_ND, weights_TK, plan.order_N, plan.inverse_TK)
    return y_TD


def sum_of_copies(rows_ND: Float[Tensor, "N D"], plan: Plan) -> Float[Tensor, "T D"]:
    """Sum of the rows of each token, in at least float32, in the type of the rows: the backward of `permute`."""
    return _sum_of_rows(rows_ND.contiguous(), plan.inverse_TK, None)


def dot_of_rows(
    left_ND: Float[Tensor, "N D"], right_ND: Float[Tensor, "N D"]
) -> Float[Tensor, " N"]:
    """Dot product of each pair of rows, in at least float32; products exist for few rows at a time."""
    if torch.compiler.is_compiling():
        # Fused code stores no products; and a loop over parts would compile anew for other numbers of rows.
        return (left_ND.to(at_least_float32(left_ND.dtype)) * right_ND).sum(dim=-1)
    parts = zip(left_ND.chunk(_NUM_PARTS), right_ND.chunk(_NUM_PARTS), strict=True)
    return torch.cat([_wide_product(left, right).sum(dim=-1) for left, right in parts])


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    wide = left.to(at_least_float32(left.dtype))
    return left * right if wide is left else wide.mul_(right)


def _sum_of_rows(rows_ND: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """sum_k weights[t, k] * rows[inverse[t, k]], without a (T, K, D) tensor in between."""
    wide = at_least_float32(rows_ND.dtype)
    if rows_ND.dtype == wide and rows_ND.shape[0]:
        weights = None if weights_TK is None else weights_TK.to(wide)
        return torch.nn.functional.embedding_bag(
            inverse_TK, rows_ND, mode="sum", per_sample_weights=weights
        )
    # embedding_bag would round the weights to the type of low-precision rows first.
    return sum_over_choices(_gathered, rows_ND, inverse_TK, weights_TK)


def _gathered(rows_ND: Tensor, index: Tensor) -> Tensor:
    return rows_ND.index_select(0, index)


def sum_over_choices(
    gather: Callable[[Tensor, Tensor], Tensor],
    rows_RD: Float[Tensor, "R D"],
    row_TK: Int[Tensor, "T K"],
    weights_TK: Float[Tensor, "T K"] | None,
) -> Float[Tensor, "T D"]:
    """sum_k weights[t, k] * rows[row[t, k]], added up in at least float32, in the rows' type.

    Args:
        gather: takes rows by number.
        rows_RD: rows.
        row_TK: each token's rows, one per choice.
        weights_TK: 1 where None.
    """
    wide = at_least_float32(rows_RD.dtype)
    total_TD = torch.zeros(row_TK.shape[0], rows_RD.shape[1], dtype=wide, device=rows_RD.device)
    for choice in range(row_TK.shape[1]):
        taken_TD = gather(rows_RD, row_TK[:, choice])
        if weights_TK is None:
            total_TD += taken_TD
        else:
            total_TD.addcmul_(taken_TD, weights_TK[:, choice, None].to(wide))
    return total_TD.to(rows_RD.dtype)


# Autograd's own backward of a gather is a scatter-add: slow, and on GPUs not deterministic. Since every copy has
# exactly one row, both backwards can gather instead.
class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x_TD: Tensor, order_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return x_TD.index_select(0, order_N // inverse_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_TK,) = ctx.saved_tensors
        return _sum_of_rows(grad_ND.contiguous(), inverse_TK, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows_ND: Tensor, weights_TK: Tensor, order_N: Tensor, inverse_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK, order_N, inverse_TK)
        return _sum_of_rows(rows_ND, inverse_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_ND, weights_TK, order_N, inverse_TK = ctx.saved_tensors
        grad_ND = grad_TD.index_select(0, order_N // weights_TK.shape[1])
        grad_weights_N = dot_of_rows(rows_ND, grad_ND)
        grad_weights_TK = grad_weights_N.to(weights_TK.dtype)[inverse_TK]
        row_weights_N1 = weights_TK.flatten().index_select(0, order_N).unsqueeze(-1)
        return grad_ND.mul_(row_weights_N1.to(grad_ND.dtype)), grad_weights_TK, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse_R), None, None
