"""Grouped matmul of quantized rows and weights: on tensor cores, or emulated."""

from collections.abc import Callable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from lightning_moe.ops.grouped_mm import torch_grouped_mm
from lightning_moe.precision.formats import Quantized, dequantize

ScaledMatmul = Callable[[Quantized, Quantized, Tensor, torch.dtype], Tensor]
"""Rows (R, X), weight (G, Y, X), rows of each group, and the type of the result (R, Y)."""

# Scales reach the tensor cores in tiles of 128 rows by 4 blocks. Source: cuBLAS, 1D block scaling factors layout.
_TILE_ROWS, _TILE_BLOCKS = 128, 4


def emulated_mm(
    rows: Quantized, weight: Quantized, counts_G: Int[Tensor, " G"], dtype: torch.dtype
) -> Tensor:
    """Products of the same codes and scales, added up in float32; on any device."""
    rows_RX, weight_GYX = dequantize(rows), dequantize(weight)
    return torch_grouped_mm(rows_RX, weight_GYX.transpose(1, 2), counts_G).to(dtype)


def rowwise_mm(
    rows: Quantized, weight: Quantized, counts_G: Int[Tensor, " G"], dtype: torch.dtype
) -> Tensor:
    """One scale per row and per output column, on CUDA with compute capability 9.0 or more."""
    return _scaled_mm(
        rows,
        weight,
        counts_G,
        scales=(rows.scales.squeeze(-1), weight.scales.squeeze(-1)),
        recipe=ScalingType.RowWise,
        swizzle=SwizzleType.NO_SWIZZLE,
    ).to(dtype)


def mxfp8_mm(
    rows: Quantized, weight: Quantized, counts_G: Int[Tensor, " G"], dtype: torch.dtype
) -> Tensor:
    """One scale per block of 32, on CUDA with compute capability 10.0 or more."""
    row_scales = tiled_scales(rows.scales.view(torch.uint8), counts_G)
    weight_scales = tiled_weight_scales(weight.scales.view(torch.uint8))
    return _scaled_mm(
        rows,
        weight,
        counts_G,
        scales=(
            row_scales.view(torch.float8_e8m0fnu),
            weight_scales.view(torch.float8_e8m0fnu),
        ),
        recipe=ScalingType.BlockWise1x32,
        swizzle=SwizzleType.SWIZZLE_32_4_4,
    ).to(dtype)


def tiled_weight_scales(scales_GYX: UInt8[Tensor, "G Y X"]) -> Tensor:
    """As `tiled_scales`, for each group's matrix; (G, bytes of its tiles)."""
    num_groups, num_columns, _ = scales_GYX.shape
    counts_G = torch.full((num_groups,), num_columns, device=scales_GYX.device)
    tiles = tiled_scales(scales_GYX.flatten(0, 1), counts_G)
    return tiles[: num_groups * _up(num_columns)].reshape(num_groups, -1)


def tiled_scales(scales_RX: UInt8[Tensor, "R X"], counts_G: Int[Tensor, " G"]) -> Tensor:
    """Scale codes in the tiles that tensor cores read; every group starts a new tile, padding is 0.

    Its size depends on R and G only, so that nothing waits for the counts: R + 128 * G rows, rounded up to tiles.
    """
    num_rows, num_blocks = scales_RX.shape
    tiles_G = (counts_G + _TILE_ROWS - 1) // _TILE_ROWS
    first_of_group_G = (tiles_G.cumsum(0) - tiles_G) * _TILE_ROWS
    ends_G = counts_G.cumsum(0)
    row_R = torch.arange(num_rows, device=scales_RX.device)
    group_R = torch.searchsorted(ends_G, row_R, right=True)
    target_R = first_of_group_G[group_R] + row_R - (ends_G - counts_G)[group_R]
    padded = scales_RX.new_zeros(
        _up(num_rows + _TILE_ROWS * len(counts_G)), -(-num_blocks // _TILE_BLOCKS) * _TILE_BLOCKS
    )
    padded[target_R, :num_blocks] = scales_RX
    tiles: Tensor = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, _TILE_BLOCKS))
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def _up(num_rows: int) -> int:
    """Rounded up to whole tiles."""
    return -(-num_rows // _TILE_ROWS) * _TILE_ROWS


def _scaled_mm(
    rows: Quantized,
    weight: Quantized,
    counts_G: Tensor,
    *,
    scales: tuple[Tensor, Tensor],
    recipe: ScalingType,
    swizzle: SwizzleType,
) -> Tensor:
    num_rows, num_columns = len(rows.codes), weight.codes.shape[1]
    if not num_rows:
        return rows.codes.new_zeros(0, num_columns, dtype=torch.bfloat16)
    out_RY: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch 2.13's stubs
        rows.codes,
        weight.codes.transpose(1, 2),
        scales[0],
        recipe,
        scales[1],
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        offs=counts_G.cumsum(0).to(torch.int32),
        output_dtype=torch.bfloat16,
        use_fast_accum=recipe == ScalingType.RowWise,
    )
    return out_RY
