"""The matmuls of the optional package `grouped_gemm` (CUTLASS on CUDA) behind the signature of `loop_grouped_mm`.

Its `backend.gmm(a, b, batch_sizes, trans_a, trans_b)` wants contiguous bfloat16 on CUDA and batch sizes as int64 on the
host; `ops.gmm`, which has a backward, has no `trans_a`. It is imported at first use.

Source: grouped_gemm 0.3.0, `grouped_gemm/backend.py` and `csrc/grouped_gemm.cu`.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context


def grouped_gemm_mm(
    rows_RX: Float[Tensor, "R X"], weight_GXY: Float[Tensor, "G X Y"], counts_G: Int[Tensor, " G"]
) -> Float[Tensor, "R Y"]:
    """The package's matmul with the contract of `loop_grouped_mm`; waits for the device to know the counts."""
    on_host_G = counts_G.to(device="cpu", dtype=torch.int64)
    rows_RY: Tensor = _GroupedGemm.apply(rows_RX, weight_GXY, on_host_G, counts_G == 0)
    return rows_RY


def grouped_gemm_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `grouped_gemm_mm` can't run in this type on this device, or None if it can."""
    if find_spec("grouped_gemm") is None:
        return (
            "the package grouped_gemm is not installed (pip install --no-build-isolation grouped_gemm, which "
            "compiles it: see docs/cuda.md)"
        )
    if device.type != "cuda":
        return f"grouped_gemm runs on CUDA only, not on {device.type}"
    if dtype != torch.bfloat16:
        return f"grouped_gemm computes in torch.bfloat16 only, not in {dtype} (trainer.precision)"
    return None


def _gmm(
    a: Tensor, b: Tensor, counts_G: Tensor, *, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    multiply = import_module("grouped_gemm.backend").gmm
    product: Tensor = multiply(a, b, counts_G, trans_a=trans_a, trans_b=trans_b)
    return product


class _GroupedGemm(torch.autograd.Function):
    """The package's own backward leaves the gradients of groups without rows, and of no rows at all, undefined."""

    @staticmethod
    def forward(
        ctx: Context, rows_RX: Tensor, weight_GXY: Tensor, counts_G: Tensor, idle_G: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows_RX, weight_GXY, counts_G, idle_G)
        return _rows_by_weight(rows_RX, weight_GXY, counts_G)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_RY: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_RX, weight_GXY, counts_G, idle_G = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _rows_by_weight(grad_RY, weight_GXY.transpose(1, 2), counts_G)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(rows_RX, grad_RY, weight_GXY, counts_G)
            grad_weight.masked_fill_(idle_G[:, None, None], 0.0)
        return grad_rows, grad_weight, None, None


def _rows_by_weight(rows_RX: Tensor, weight_GXY: Tensor, counts_G: Tensor) -> Tensor:
    if not len(rows_RX):
        return rows_RX.new_zeros(0, weight_GXY.shape[2])
    if weight_GXY.is_contiguous():
        return _gmm(rows_RX.contiguous(), weight_GXY, counts_G)
    weight_GYX = weight_GXY.transpose(1, 2).contiguous()
    return _gmm(rows_RX.contiguous(), weight_GYX, counts_G, trans_b=True)


def _weight_gradient(
    rows_RX: Tensor, grad_RY: Tensor, weight_GXY: Tensor, counts_G: Tensor
) -> Tensor:
    """In the memory layout of the weight, where that is one of a matrix or its transpose; idle groups hold anything."""
    if not len(rows_RX):
        return torch.zeros_like(weight_GXY)
    rows_RX, grad_RY = rows_RX.contiguous(), grad_RY.contiguous()
    if weight_GXY.is_contiguous():
        return _gmm(rows_RX, grad_RY, counts_G, trans_a=True)
    return _gmm(grad_RY, rows_RX, counts_G, trans_a=True).transpose(1, 2)
