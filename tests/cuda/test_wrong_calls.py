"""Calls of torch's grouped matmuls that must be refused on the host, before a kernel reads out of bounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, grouped_mm, scaled_grouped_mm

E4M3, E8M0, BF16, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32
Case = Callable[[str], Tensor]


def _empty(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


def _ends(device: str) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)


def _plain(
    change: Callable[[dict[str, Any], str], None] = lambda given, device: None,
) -> Case:
    def call(device: str) -> Tensor:
        given = {"mat_a": _empty(device, 64, 64), "mat_b": _empty(device, 4, 64, 128)}
        given["offs"] = _ends(device)
        change(given, device)
        return grouped_mm(**given)

    return call


def _with(**changes: Callable[[str], Any]) -> Case:
    return _plain(lambda given, device: given.update({k: v(device) for k, v in changes.items()}))


def _scaled(recipe: ScalingType, device: str, **changes: Callable[[str], Any]) -> Tensor:
    rowwise = recipe == ScalingType.RowWise
    swizzle = SwizzleType.NO_SWIZZLE if rowwise else SwizzleType.SWIZZLE_32_4_4
    given = {
        "mat_a": _empty(device, 64, 64, dtype=E4M3),
        "mat_b": _empty(device, 4, 128, 64, dtype=E4M3).transpose(1, 2),
        "scale_a": _empty(device, 64, dtype=F32)
        if rowwise
        else _empty(device, 64 + 128 * 4, 4, dtype=E8M0),
        "scale_b": _empty(device, 4, 128, dtype=F32)
        if rowwise
        else _empty(device, 4, 128 * 4, dtype=E8M0),
        "offs": _ends(device),
        "swizzle_a": swizzle,
        "swizzle_b": swizzle,
        "output_dtype": BF16,
    } | {name: change(device) for name, change in changes.items()}
    return scaled_grouped_mm(scale_recipe_a=recipe, scale_recipe_b=recipe, **given)


def _rowwise(**changes: Callable[[str], Any]) -> Case:
    return lambda device: _scaled(ScalingType.RowWise, device, **changes)


def _blocks(**changes: Callable[[str], Any]) -> Case:
    return lambda device: _scaled(ScalingType.BlockWise1x32, device, **changes)


RIGHT: dict[str, Case] = {
    "bfloat16": _plain(),
    "float32": _with(
        mat_a=lambda d: _empty(d, 64, 64, dtype=F32),
        mat_b=lambda d: _empty(d, 4, 64, 128, dtype=F32),
    ),
    "rowwise": _rowwise(),
    "mxfp8": _blocks(),
}
WRONG: dict[str, Case] = {
    "float64": _with(
        mat_a=lambda d: _empty(d, 64, 64, dtype=torch.float64),
        mat_b=lambda d: _empty(d, 4, 64, 128, dtype=torch.float64),
    ),
    "offsets in int64": _with(offs=lambda d: _ends(d).long()),
    "offsets on the CPU": _with(offs=lambda d: _ends("cpu")),
    "weight on the CPU": _with(mat_b=lambda d: _empty("cpu", 4, 64, 128)),
    "rows on the CPU": _with(mat_a=lambda d: _empty("cpu", 64, 64)),
    "two types": _with(mat_b=lambda d: _empty(d, 4, 64, 128, dtype=F32)),
    "rows of 120 bytes": _with(
        mat_a=lambda d: _empty(d, 64, 60), mat_b=lambda d: _empty(d, 4, 60, 128)
    ),
    "rows 2 bytes off": _with(mat_a=lambda d: _empty(d, 64 * 64 + 1)[1:].view(64, 64)),
    "every second column": _with(mat_a=lambda d: _empty(d, 64, 128)[:, ::2]),
    "inner sizes differ": _with(mat_b=lambda d: _empty(d, 4, 32, 128)),
    "no offsets": _with(offs=lambda d: None),
    "rowwise, weight row by row": _rowwise(mat_b=lambda d: _empty(d, 4, 64, 128, dtype=E4M3)),
    "rowwise, rows in bfloat16": _rowwise(mat_a=lambda d: _empty(d, 64, 64)),
    "rowwise, scales (R, 1)": _rowwise(scale_a=lambda d: _empty(d, 64, 1, dtype=F32)),
    "rowwise, too few scales": _rowwise(scale_a=lambda d: _empty(d, 32, dtype=F32)),
    "rowwise, scales in bfloat16": _rowwise(scale_a=lambda d: _empty(d, 64)),
    "rowwise, offsets in int64": _rowwise(offs=lambda d: _ends(d).long()),
    "rowwise, width 24": _rowwise(
        mat_a=lambda d: _empty(d, 64, 24, dtype=E4M3),
        mat_b=lambda d: _empty(d, 4, 128, 24, dtype=E4M3).transpose(1, 2),
    ),
    "rowwise, float32 out": _rowwise(output_dtype=lambda d: F32),
    "mxfp8, scales in float32": _blocks(scale_a=lambda d: _empty(d, 64, dtype=F32)),
    "mxfp8, scales not in tiles": _blocks(
        swizzle_a=lambda d: SwizzleType.NO_SWIZZLE, swizzle_b=lambda d: SwizzleType.NO_SWIZZLE
    ),
    "mxfp8, weight's scales flat": _blocks(scale_b=lambda d: _empty(d, 4 * 128 * 4, dtype=E8M0)),
    "mxfp8, weight's scales short": _blocks(scale_b=lambda d: _empty(d, 4, 256, dtype=E8M0)),
    "mxfp8, weight row by row": _blocks(mat_b=lambda d: _empty(d, 4, 64, 128, dtype=E4M3)),
}


def _device(name: str) -> str:
    return "cuda:2" if name.startswith("mxfp8") else "cuda:0"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_call_is_accepted(name: str) -> None:
    assert RIGHT[name](_device(name)).shape == (64, 128)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name: str) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        WRONG[name](_device(name))


# torch 2.13 looks at fewer things where no memory exists.
@pytest.mark.parametrize("name", [name for name in WRONG if name != "rows 2 bytes off"])
def test_a_wrong_call_is_refused_by_fake_tensors_as_well(name: str) -> None:
    with FakeTensorMode(), pytest.raises((RuntimeError, ValueError)):
        WRONG[name](_device(name))


def test_too_few_mxfp8_scales_of_rows_pass_so_that_they_must_be_right_here() -> None:
    """On a device that is a read out of bounds: `precision.scaled_mm.tiled_scales` sizes them by rows and groups."""
    few = _blocks(scale_a=lambda d: _empty(d, 64, 4, dtype=E8M0))
    assert few("cuda:2").shape == (64, 128)
