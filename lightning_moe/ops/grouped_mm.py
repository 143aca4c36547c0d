"""Matmul of consecutive groups of rows, each with its own matrix, behind one signature."""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context
from lightning_moe.ops.checks import check_on_device
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.ops.device import capability_of

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]

# torch's grouped kernels read rows in 16-byte units.
STRIDE_BYTES: Final = 16


@outside_of_graphs  # the number of rows of each matmul depends on the routing
def loop_grouped_mm(
    rows_RX: Float[Tensor, "R X"], weight_GXY: Float[Tensor, "G X Y"], counts_G: Int[Tensor, " G"]
) -> Float[Tensor, "R Y"]:
    """One matmul per group: the reference. Any float type and any width; syncs with the host on a GPU.

    The first counts_G[0] rows meet weight_GXY[0], the next counts_G[1] rows weight_GXY[1] and so on; the counts
    add up to R. A group without rows gets a zero gradient.
    """
    parts = rows_RX.split(counts_G.tolist())
    return torch.cat([part @ weight_XY for part, weight_XY in zip(parts, weight_GXY, strict=True)])


def torch_grouped_mm(
    rows_RX: Float[Tensor, "R X"], weight_GXY: Float[Tensor, "G X Y"], counts_G: Int[Tensor, " G"]
) -> Float[Tensor, "R Y"]:
    """`torch.nn.functional.grouped_mm` with the contract of `loop_grouped_mm`; see `torch_grouped_mm_refusal`.

    Raises:
        RuntimeError: if the counts don't add up to R, which would leave rows undefined; see `check_on_device`.
    """
    ends_G = counts_G.cumsum(0).to(torch.int32)
    check_on_device(
        (ends_G[-1] == len(rows_RX)) & (counts_G.amin() >= 0),
        "counts_G must be the rows of each group, at least 0, and add up to all rows",
    )
    rows_RY: Tensor = _TorchGroupedMatmul.apply(rows_RX, weight_GXY, ends_G)
    return rows_RY


def torch_weight_gradient(
    rows_RX: Float[Tensor, "R X"], grad_RY: Float[Tensor, "R Y"], counts_G: Int[Tensor, " G"]
) -> Float[Tensor, "G X Y"]:
    """Per group the product of its rows, transposed, and their gradients; zero for a group without rows."""
    return _weight_gradient(rows_RX, grad_RY, counts_G.cumsum(0).to(torch.int32))


def torch_grouped_mm_refusal(dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    """Why `torch_grouped_mm` can't serve matrices of these widths in `dtype`, or None if it can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"torch's grouped matmul has no {dtype} kernel"
    multiple = STRIDE_BYTES // dtype.itemsize
    if odd := [width for width in widths if width % multiple]:
        return f"torch's grouped matmul needs widths that are multiples of {multiple} in {dtype}, not {odd[0]}"
    return None


def torch_grouped_mm_waits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one of torch's grouped matmuls makes the host wait for the device.

    torch 2.13 has kernels in bfloat16 for compute capabilities 9.x and 10.x; elsewhere it reads the counts and loops.
    """
    capability = capability_of(device)
    has_kernel = dtype == torch.bfloat16 and capability is not None and capability[0] in (9, 10)
    return capability is not None and not has_kernel


@torch.library.custom_op("lightning_moe::grouped_mm", mutates_args=())
def _grouped_mm(left: Tensor, right: Tensor, ends_G: Tensor) -> Tensor:
    """(R, X) by (G, X, Y), or (X, R) by (R, Y), which gives (G, X, Y)."""
    return torch.nn.functional.grouped_mm(left, right, offs=ends_G)


@_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, ends_G: Tensor) -> Tensor:
    # An operator of our own, because the shape rule that the compiler has for torch 2.13's takes bfloat16 only.
    groups = (len(ends_G),) if right.dim() == left.dim() else ()
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


class _TorchGroupedMatmul(torch.autograd.Function):
    """torch's own backward refuses expanded gradients and has left the gradients of idle groups uninitialised."""

    @staticmethod
    def forward(ctx: Context, rows_RX: Tensor, weight_GXY: Tensor, ends_G: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RX, weight_GXY, ends_G)
        out_RY: Tensor = _grouped_mm(rows_RX, weight_GXY, ends_G)
        return out_RY

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_RY: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RX, weight_GXY, ends_G = ctx.saved_tensors
        grad_RY = grad_RY.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _grouped_mm(grad_RY, weight_GXY.transpose(1, 2), ends_G)
        if ctx.needs_input_grad[1]:
            # In the memory layout of the weight, so that optimizers and reducers see no strided gradient.
            if weight_GXY.is_contiguous():
                grad_weight = _weight_gradient(rows_RX, grad_RY, ends_G)
            else:
                grad_weight = _weight_gradient(grad_RY, rows_RX, ends_G).transpose(1, 2)
        return grad_rows, grad_weight, None


def _weight_gradient(rows_RX: Tensor, grad_RY: Tensor, ends_G: Tensor) -> Tensor:
    grad_weight: Tensor = _grouped_mm(rows_RX.t(), grad_RY, ends_G)
    if grad_weight.is_cuda:
        # pytorch/pytorch#172439: on some GPUs a group without rows gets uninitialised memory.
        idle_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
        grad_weight.masked_fill_(idle_G[:, None, None], 0.0)
    return grad_weight
