"""Matmuls of quantized tensors."""

import warnings

import pytest
import torch

from lightning_moe.precision import dequantize, quantize_mxfp8, quantize_rowwise
from lightning_moe.precision.scaled_mm import emulated_mm, tiled_scales, tiled_weight_scales

with warnings.catch_warnings():
    # torchao 0.18 on torch 2.13 registers its enums with a deprecated call.
    warnings.simplefilter("ignore")
    from torchao.prototype.moe_training.kernels.mxfp8.quant import (
        torch_to_blocked_2d_M_groups,
        torch_to_blocked_per_group_3d,
    )
    from torchao.prototype.mx_formats.utils import to_blocked


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [0, 8, 0], [1, 1, 1]])
@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_rowwise])
def test_emulation_multiplies_what_the_codes_stand_for(
    quantize: object, counts: list[int], generator: torch.Generator
) -> None:
    rows = quantize(torch.randn(sum(counts), 64, generator=generator))
    weight = quantize(torch.randn(3, 20, 64, generator=generator))
    out = emulated_mm(rows, weight, torch.tensor(counts), torch.float32)
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    wanted = torch.einsum(
        "rx,ryx->ry", dequantize(rows).double(), dequantize(weight).double()[groups]
    )
    torch.testing.assert_close(out, wanted.float())


@pytest.mark.parametrize("counts", [[130, 0, 7, 128], [0, 1, 0, 300]])
def test_tiles_of_row_scales_equal_those_of_torchao_exactly(
    counts: list[int], generator: torch.Generator
) -> None:
    scales = torch.randint(1, 255, (sum(counts), 8), generator=generator, dtype=torch.uint8)
    theirs, _ = torch_to_blocked_2d_M_groups(scales, torch.tensor(counts).cumsum(0))
    ours = tiled_scales(scales, torch.tensor(counts))
    size = min(theirs.numel(), ours.numel())
    assert torch.equal(ours.flatten()[:size], theirs.flatten()[:size])
    assert not ours.flatten()[size:].any()


def test_tiles_of_one_matrix_equal_those_of_torchao_exactly(generator: torch.Generator) -> None:
    scales = torch.randint(1, 255, (200, 6), generator=generator, dtype=torch.uint8)
    theirs = to_blocked(scales).flatten()
    ours = tiled_scales(scales, torch.tensor([200])).flatten()
    assert torch.equal(ours[: theirs.numel()], theirs)


@pytest.mark.parametrize("columns", [96, 128, 200])
def test_tiles_of_weight_scales_equal_those_of_torchao_exactly(
    columns: int, generator: torch.Generator
) -> None:
    scales = torch.randint(1, 255, (3, columns, 6), generator=generator, dtype=torch.uint8)
    assert torch.equal(tiled_weight_scales(scales), torch_to_blocked_per_group_3d(scales))
