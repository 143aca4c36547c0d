"""Activations between an expert's two matmuls."""

from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context

_BLOCK_NUMBERS: Final = 2**18


def swiglu(up_gate_RP: Float[Tensor, "R P"]) -> Float[Tensor, "R F"]:
    """Product of `up` and silu(`gate`), where a row is [up; gate]. Keeps only its input for backward.

    Source: GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    if torch.compiler.is_compiling():
        # The compiler fuses the plain form, and can't write into half of a row.
        up_RF, gate_RF = up_gate_RP.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_RF) * up_RF
    hidden_RF: Tensor = _SwiGLU.apply(up_gate_RP)
    return hidden_RF


def relu2(up_RP: Float[Tensor, "R P"]) -> Float[Tensor, "R P"]:
    """Squared ReLU. Source: Primer, arXiv:2109.08668."""
    return up_RP.relu().square()


def gpt_oss_swiglu(
    gate_up_RP: Float[Tensor, "R P"], *, alpha: float = 1.702, limit: float | None = None
) -> Float[Tensor, "R F"]:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate); a row interleaves gate (even) and up (odd).

    With `limit`, gate is clamped above and up on both sides before use. Source: gpt-oss model card, OpenAI 2025.
    """
    gate_RF, up_RF = gate_up_RP[:, 0::2], gate_up_RP[:, 1::2]
    if limit is not None:
        gate_RF, up_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
    return (up_RF + 1) * gate_RF * torch.sigmoid(alpha * gate_RF)


def activation_function(
    name: Literal["swiglu", "relu2", "gpt_oss_swiglu"],
    *,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Callable[[Tensor], Tensor]:
    """The function of that name; `alpha` and `limit` belong to gpt_oss_swiglu."""
    if name == "gpt_oss_swiglu":
        return partial(gpt_oss_swiglu, alpha=alpha, limit=limit)
    return {"swiglu": swiglu, "relu2": relu2}[name]


class _SwiGLU(torch.autograd.Function):
    """One saved tensor instead of three; the gradient is written in place, without another buffer.

    Block by block on a CPU, so that each operation reads from the cache what the one before wrote.
    """

    @staticmethod
    def forward(ctx: Context, up_gate_RP: Tensor) -> Tensor:
        ctx.save_for_backward(up_gate_RP)
        num_rows, packed = up_gate_RP.shape
        hidden_RF = up_gate_RP.new_empty(num_rows, packed // 2)
        for given, hidden in zip(*_blocks(up_gate_RP, hidden_RF), strict=True):
            up, gate = given.chunk(2, dim=-1)
            torch.ops.aten.silu.out(gate, out=hidden).mul_(up)
        return hidden_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_RF: Tensor) -> Tensor:
        (up_gate_RP,) = ctx.saved_tensors
        grad_RP = torch.empty_like(up_gate_RP)
        for given, grad, result in zip(*_blocks(up_gate_RP, grad_RF, grad_RP), strict=True):
            up, gate = given.chunk(2, dim=-1)
            grad_up, grad_gate = result.chunk(2, dim=-1)
            torch.mul(grad, up, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_up, gate, grad_input=grad_gate)
            torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        return grad_RP


def _blocks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor cut into the same runs of rows: on a CPU of so many numbers that a few of them fit its cache."""
    first = tensors[0]
    rows = len(first) if first.device.type != "cpu" else _BLOCK_NUMBERS // first.shape[1]
    return [tensor.split(max(1, rows)) for tensor in tensors]
