"""Rows that travel to their experts as bytes: bytes have no gradient, so autograd goes around them in one step."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_moe.nn.dispatch import Dispatched, Dispatcher
from lightning_moe.ops.autograd import Context
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.ops.dtypes import matmul_dtype

if TYPE_CHECKING:

    class _Context(Context):
        dispatcher: Dispatcher
        dtype: torch.dtype
        structure: pytree.TreeSpec
        constants: list[Any]

else:
    _Context = Context


def arrived(
    dispatcher: Dispatcher,
    flight: Any,  # noqa: ANN401 - only the dispatcher reads it
    x_TW: Float[Tensor, "T W"],
) -> Dispatched:
    """`dispatcher.receive(flight)`, which autograd connects to `x_TW` also where bytes were sent in its place."""
    sent = dispatcher.receive(flight)
    return sent if sent.rows_RW.is_floating_point() else _linked(dispatcher, sent, x_TW)


@outside_of_graphs  # a graph can't hold the dispatcher that backward calls
def _linked(dispatcher: Dispatcher, sent: Dispatched, x_TW: Tensor) -> Dispatched:
    rows_RW = _Link.apply(x_TW, len(sent.rows_RW), dispatcher, sent.back)
    return replace(sent, rows_RW=rows_RW, bytes_RZ=sent.rows_RW)


class _Link(torch.autograd.Function):
    """Connects tokens to rows without values or memory; backward sends the rows' gradients to the tokens."""

    @staticmethod
    def forward(
        ctx: _Context,
        x_TW: Tensor,
        num_rows: int,
        dispatcher: Dispatcher,
        back: Any,  # noqa: ANN401 - only the dispatcher reads it
    ) -> Tensor:
        ctx.dispatcher, ctx.dtype = dispatcher, x_TW.dtype
        leaves, ctx.structure = pytree.tree_flatten(back)
        # Tensors go through `save_for_backward`, so that recomputation can drop them; it takes nothing else.
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in leaves))
        ctx.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # In the type that experts compute in; NaN, so that a read of these values shows.
        value = x_TW.new_full((), math.nan, dtype=matmul_dtype(x_TW))
        return value.expand(num_rows, x_TW.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_RW: Tensor) -> tuple[Tensor, None, None, None]:
        pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
        leaves = [constant if tensor is None else tensor for tensor, constant in pairs]
        back = pytree.tree_unflatten(leaves, ctx.structure)
        grad_TW = ctx.dispatcher.token_gradient(grad_RW.to(ctx.dtype), back)
        return grad_TW, None, None, None
