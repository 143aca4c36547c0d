"""CUDA's operators that have no CPU version: what they compute, from their definitions."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

_TILE_ROWS: Final = 128


def untiled(tiles: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """Scales out of the tiles of 128 rows by 4 blocks that tensor cores read.

    Row r, block b of a tile lies at (r % 32) * 16 + (r // 32) * 4 + b; tiles follow each other along blocks first.

    Source: cuBLAS, 1D block scaling factors layout.
    """
    tiles_across = -(-num_blocks // 4)
    row, block = torch.meshgrid(torch.arange(num_rows), torch.arange(num_blocks), indexing="ij")
    inside = (row % 32) * 16 + (row % _TILE_ROWS) // 32 * 4 + block % 4
    tile = row // _TILE_ROWS * tiles_across + block // 4
    return tiles.flatten()[tile * 512 + inside]


def _scaled_grouped_mm(*args: Any, **options: Any) -> Tensor:
    """Rows (R, X) by matrices (G, X, Y); scales per row and column, or per block of 32 along X."""
    rows, weight, row_scales, _, _, weight_scales, _, _, ends = args[:9]
    bounds = [0, *ends.tolist()]
    products, first_scale = [], 0
    for group, (start, end) in enumerate(pairwise(bounds)):
        left, right = rows[start:end].float(), weight[group].float()
        if row_scales[0].dtype == torch.float32:
            left = left * row_scales[0][start:end, None]
            right = right * weight_scales[0][group][None, :]
        else:
            own = row_scales[0].view(torch.uint8)[first_scale:]
            left = left * _blocks(own, *left.shape)
            right = right * _blocks(weight_scales[0].view(torch.uint8)[group], *right.t().shape).t()
            first_scale += -(-len(left) // _TILE_ROWS) * _TILE_ROWS
        products.append(left @ right)
    return torch.cat(products).bfloat16()


def _blocks(tiles: Tensor, num_rows: int, width: int) -> Tensor:
    scales = untiled(tiles, num_rows, width // 32).view(torch.float8_e8m0fnu)
    return scales.float().repeat_interleave(32, 1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q.float(),
        k.float().repeat_interleave(repeats, 1),
        v.float().repeat_interleave(repeats, 1),
        attn_mask=bias if bias is None or bias.dtype == torch.bool else bias.float(),
        is_causal=causal,
        scale=scale,
    )
    return mixed.to(q.dtype)


def _attention_gradients(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide_q, wide_grad = q.float(), grad.float()
    wide_k, wide_v = (tensor.float().repeat_interleave(repeats, 1) for tensor in (k, v))
    scores = scale * wide_q @ wide_k.transpose(-1, -2)
    if bias is not None:
        masked = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else None
        scores = scores + bias if masked is None else masked
    if causal:
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    shares = scores.softmax(-1)
    grad_shares = wide_grad @ wide_v.transpose(-1, -2)
    grad_scores = scale * shares * (grad_shares - (grad_shares * shares).sum(-1, keepdim=True))
    wide = grad_scores.transpose(-1, -2) @ wide_q, shares.transpose(-1, -2) @ wide_grad
    grad_k, grad_v = (g.unflatten(1, (-1, repeats)).sum(2).to(k.dtype) for g in wide)
    return (grad_scores @ wide_k).to(q.dtype), grad_k, grad_v


def _flash(*args: Any, scale: float | None = None) -> tuple[Tensor]:
    q, k, v, _, causal = (*args, 0.0, False)[:5]
    return (_attention(q, k, v, None, causal, scale),)


def _flash_backward(*args: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    grad, *qkv = args[:4]
    return _attention_gradients(grad, tuple(qkv), None, args[11], scale)


def _efficient(*args: Any, is_causal: bool = False, scale: float | None = None) -> tuple[Tensor]:
    q, k, v, bias = args[:4]
    causal = args[6] if len(args) > 6 else is_causal
    return (_attention(q, k, v, bias, causal, scale),)


def _efficient_backward(
    *args: Any, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, ...]:
    grad, *qkv = args[:4]
    causal = args[11] if len(args) > 11 else is_causal
    return _attention_gradients(grad, tuple(qkv), args[4], causal, scale)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor, Tensor]:
    wide, wide_grad = x.float(), grad.float()
    normed = wide * rstd.float()
    scaled = wide_grad if weight is None else wide_grad * weight.float()
    grad_x = rstd.float() * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    grad_weight = (wide_grad * normed).flatten(0, -2).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(x.dtype if weight is None else weight.dtype)


TWINS: Final[dict[str, Callable[..., Any]]] = {
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::_scaled_grouped_mm_v2": _scaled_grouped_mm,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
