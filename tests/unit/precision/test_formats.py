"""MXFP8 and row-wise FP8 against float64 by the standard's text, and bit for bit against torchao."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe.precision import (
    Quantized,
    dequantize,
    quantize_mxfp8,
    quantize_rowwise,
    rows_from_bytes,
    rows_to_bytes,
)

with warnings.catch_warnings():
    # torchao 0.18 on torch 2.13 registers its enums with a deprecated call.
    warnings.simplefilter("ignore")
    from torchao.float8.float8_utils import ScalingGranularity, tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

MODES = pytest.mark.parametrize("mode", ["rceil", "floor"])
EXPONENTS = [-149, -140, -130, -127, -126, -120, -119, -118, -100, -40, 0, 60, 119, 120, 127]
# Every finite e4m3 value, by its definition: 4 exponent bits of bias 7, 3 mantissa bits, no infinity.
E4M3 = sorted(
    {m * 2.0**-9 for m in range(8)}
    | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)


def _nearest_e4m3(value: float) -> float:
    """Round to nearest, ties to an even mantissa, saturating."""
    size = min(abs(value), 448.0)
    best = min(
        range(len(E4M3)), key=lambda i: (abs(E4M3[i] - size), i % 2)
    )  # neighbours alternate between even and odd mantissas
    return math.copysign(E4M3[best], value)


def _exponent(largest: float, mode: str) -> int:
    if largest == 0:
        return -127
    if mode == "floor":
        exponent = math.frexp(largest)[1] - 1 - 8
    else:
        exponent = next(e for e in range(-300, 300) if largest <= 448.0 * 2.0**e)
    return max(-127, min(127, exponent))


def _expected(block: Tensor, mode: str) -> tuple[int, list[float]]:
    """Scale code and decoded values of one block."""
    values = block.double().tolist()
    e = _exponent(max(map(abs, values)), mode)
    return e + 127, [_nearest_e4m3(v / 2.0**e) * 2.0**e for v in values]


def _scaled(generator: torch.Generator, exponent: int) -> Tensor:
    """(6, 96) values below 2^(exponent + 1)."""
    values = torch.randn(6, 96, generator=generator, dtype=torch.float64).clamp(-1.9, 1.9)
    return (values * 2.0**exponent).float()


@MODES
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_scales_and_values_are_those_of_the_standard_exactly(
    exponent: int, mode: str, generator: torch.Generator
) -> None:
    values = _scaled(generator, exponent)[:2, :64]
    quantized = quantize_mxfp8(values, mode)
    decoded = dequantize(quantized)
    for row in range(2):
        for block in range(2):
            columns = slice(32 * block, 32 * block + 32)
            code, wanted = _expected(values[row, columns], mode)
            assert quantized.scales.view(torch.uint8)[row, block].item() == code
            assert decoded[row, columns].double().tolist() == wanted


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_mxfp8_equals_torchao_bit_for_bit_above_the_smallest_scale(
    exponent: int, dtype: torch.dtype, mode: str, generator: torch.Generator
) -> None:
    values = _scaled(generator, exponent).to(dtype)
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode.upper()])
    ours = quantize_mxfp8(values, mode)
    codes_of_scales = scales.view(torch.uint8)
    assert torch.equal(ours.scales.view(torch.uint8), codes_of_scales)
    # With the scale 2^-127 torchao divides by 1 or 2^-126, which its own decoder doesn't undo.
    above = (codes_of_scales > 0)[..., None]
    pairs = [c.view(torch.uint8).unflatten(-1, (3, 32)) * above for c in (ours.codes, codes)]
    assert torch.equal(*pairs)
    assert bool(above.any()) or exponent < -118


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_row_wise_equals_torchao_bit_for_bit(exponent: int, generator: torch.Generator) -> None:
    values = _scaled(generator, exponent)
    values[1] = 0.0
    values[2, 7], values[3, 8], values[4, 9] = torch.nan, torch.inf, -torch.inf
    scale = tensor_to_scale(
        values,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    ours = quantize_rowwise(values)
    torch.testing.assert_close(ours.scales, scale.reciprocal(), rtol=0, atol=0, equal_nan=True)
    theirs = to_fp8_saturated(values * scale, torch.float8_e4m3fn)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.view(torch.uint8))


def test_floor_clips_the_largest_values_and_rceil_does_not() -> None:
    block = torch.full((1, 32), 500.0)
    floor, rceil = quantize_mxfp8(block, "floor"), quantize_mxfp8(block, "rceil")
    assert floor.scales.float().item() == 1.0
    assert rceil.scales.float().item() == 2.0
    assert dequantize(floor)[0, 0].item() == 448.0
    assert dequantize(rceil)[0, 0].item() == 512.0  # 250 lies between 240 and 256


@pytest.mark.parametrize(
    ("largest", "mode", "code"),
    [
        (448.0, "rceil", 127),
        (448.00003, "rceil", 128),
        (449.0, "rceil", 128),
        (448.0, "floor", 127),
        (511.9, "floor", 127),
        (512.0, "floor", 128),
        (1e-45, "rceil", 0),
        (1e-45, "floor", 0),
        (2.0**-127, "rceil", 0),
        (2.0**-118, "floor", 1),
        (3e38, "rceil", 247),
        (3e38, "floor", 246),
        (math.inf, "rceil", 254),
        (math.inf, "floor", 247),
        (math.nan, "rceil", 255),
        (math.nan, "floor", 255),
    ],
)
def test_scale_code_by_hand(largest: float, mode: str, code: int) -> None:
    block = torch.zeros(32)
    block[11] = largest
    assert quantize_mxfp8(block, mode).scales.view(torch.uint8).item() == code


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_rowwise])
def test_zeros_stay_zero_and_disturb_nothing(quantize: object, generator: torch.Generator) -> None:
    values = torch.randn(4, 64, generator=generator)
    untouched = dequantize(quantize(values))
    values[2] = 0.0
    values[0, :32] = -0.0
    decoded = dequantize(quantize(values))
    assert torch.equal(decoded[2], torch.zeros(64))
    assert torch.equal(decoded[0, :32], torch.zeros(32))
    assert torch.equal(decoded[[1, 3]], untouched[[1, 3]])
    assert decoded.isfinite().all()


@MODES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_stays_in_its_block(bad: float, mode: str, generator: torch.Generator) -> None:
    values = torch.randn(3, 96, generator=generator)
    clean = dequantize(quantize_mxfp8(values, mode))
    values[1, 40] = bad
    decoded = dequantize(quantize_mxfp8(values, mode))
    # Infinity becomes the largest code times the largest scale, which is beyond float32.
    assert not decoded[1, 40].isfinite()
    decoded[1, 32:64] = clean[1, 32:64]
    assert torch.equal(decoded, clean)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_stays_in_its_row(bad: float, generator: torch.Generator) -> None:
    values = torch.randn(3, 48, generator=generator)
    clean = dequantize(quantize_rowwise(values))
    values[1, 40] = bad
    decoded = dequantize(quantize_rowwise(values))
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[[0, 2]], clean[[0, 2]])


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32)
)
def test_normal_values_lose_at_most_a_sixteenth(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    quantized = quantize_mxfp8(values)
    scale = quantized.scales.double().item()
    # Below 2^-6 of the scale, codes are subnormal with steps of 2^-9.
    allowed = torch.maximum(values.double().abs() / 16, torch.tensor(scale * 2.0**-10))
    # In the decoded type a code times the largest scale may be beyond the range.
    decoded = quantized.codes.double() * scale
    assert bool(((decoded - values.double()).abs() <= allowed).all())


@MODES
def test_quantizing_again_changes_nothing_exactly(mode: str, generator: torch.Generator) -> None:
    once = dequantize(quantize_mxfp8(torch.randn(5, 64, generator=generator), mode))
    assert torch.equal(dequantize(quantize_mxfp8(once, mode)), once)


def test_bytes_per_value() -> None:
    assert quantize_mxfp8(torch.ones(4, 64)).nbytes == 4 * 64 * 33 / 32
    assert quantize_rowwise(torch.ones(4, 64)).nbytes == 4 * 64 + 4 * 4


def test_a_width_that_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks of 32.*48 is not a multiple"):
        quantize_mxfp8(torch.ones(2, 48))


SPECIAL = [0.0, -0.0, 1e-45, -3e-41, 2.0**-127, 448.0, 3.4e38, math.inf, -math.inf, math.nan]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    blocks=st.integers(1, 3),
    exponent=st.integers(-149, 127),
    specials=st.lists(st.tuples(st.integers(0, 479), st.sampled_from(SPECIAL)), max_size=6),
    row_of_zeros=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_as_bytes_come_out_as_the_same_bits(
    rows: int,
    blocks: int,
    exponent: int,
    specials: list[tuple[int, float]],
    row_of_zeros: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 32 * blocks, generator=generator, dtype=torch.float64)
    values = (values * 2.0**exponent).float()
    for place, special in specials if rows else []:
        values.view(-1)[place % values.numel()] = special
    if row_of_zeros:
        values[:1] = 0.0
    for quantize, scale_dtype, scale_bytes in (
        (quantize_mxfp8, torch.float8_e8m0fnu, blocks),
        (quantize_rowwise, torch.float32, 4),
    ):
        quantized = quantize(values)
        in_bytes = rows_to_bytes(quantized)
        assert (in_bytes.dtype, in_bytes.shape) == (torch.uint8, (rows, 32 * blocks + scale_bytes))
        # Rows stand alone: sent in another order, they come out in that order.
        order = torch.randperm(rows, generator=generator)
        back = rows_from_bytes(in_bytes[order], 32 * blocks, scale_dtype)
        for got, part in (
            (back.codes, quantized.codes),
            (back.scales, quantized.scales),
        ):
            assert got.dtype == part.dtype
            assert got.is_contiguous()
            assert torch.equal(got.view(torch.uint8), part.view(torch.uint8)[order])


def test_a_row_as_bytes_is_its_codes_then_its_scales_by_hand() -> None:
    values = torch.zeros(2, 64)
    values[0, 0], values[0, 63], values[1, 1] = 448.0, -2.0, 1.75 * 2.0**-127
    # e4m3 448 is 0x7E, -256 is 0xF8 (-2 over the scale 2^-7), 1.75 is 0x3E.
    mxfp8 = rows_to_bytes(quantize_mxfp8(values))
    assert mxfp8[0].tolist() == [0x7E, *[0] * 62, 0xF8, 127, 120]
    assert mxfp8[1].tolist() == [0, 0x3E, *[0] * 62, 0, 0]
    rowwise = rows_to_bytes(quantize_rowwise(values[:1]))
    # -2 is 0xC0; 1.0 in float32, least byte first, is 00 00 80 3F.
    assert rowwise[0].tolist() == [0x7E, *[0] * 62, 0xC0, 0, 0, 0x80, 0x3F]


@pytest.mark.parametrize(
    ("scale_dtype", "num_bytes"), [(torch.float8_e8m0fnu, 66), (torch.float32, 68)]
)
def test_bytes_of_zeros_are_a_row_of_zeros(scale_dtype: torch.dtype, num_bytes: int) -> None:
    quantized = rows_from_bytes(torch.zeros(3, num_bytes, dtype=torch.uint8), 64, scale_dtype)
    assert isinstance(quantized, Quantized)
    assert torch.equal(dequantize(quantized), torch.zeros(3, 64))
