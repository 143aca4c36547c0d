"""Values as e4m3 codes with scales: one per block of 32 (MXFP8), or one per row."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

BLOCK: Final = 32
E4M3_MAX: Final = 448.0
_E8M0_BIAS: Final = 127
_E8M0_NAN: Final = 255
# Below this a row's scale would overflow. The value is torchao's.
_SMALLEST_ROW_MAX: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Quantized:
    """Values x = code * scale.

    Attributes:
        codes: float8_e4m3fn, of the values' shape (..., X), contiguous.
        scales: (..., X / 32) in float8_e8m0fnu, or (..., 1) in float32; powers of two.
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@torch.no_grad()
def quantize_mxfp8(values: Tensor, scale_mode: Literal["rceil", "floor"] = "rceil") -> Quantized:
    """Codes and scales of the microscaling format MXFP8 (e4m3), in blocks along the last dimension.

    A block's scale is 2^e with e = ceil(log2(max / 448)) for `rceil`, which clips nothing, or e = floor(log2(max)) - 8
    for `floor`, which clips what exceeds 448 * 2^e; e is clamped to [-127, 127]. A block of zeros has e = -127. A NaN
    makes its block NaN (scale code 255); an infinite value gets the largest scale that the rule gives and stays in
    its block.

    Raises:
        ValueError: if the last dimension isn't a multiple of 32.

    Source: OCP Microscaling Formats (MX) 1.0, 5.2 and 6.3; `rceil` is the rule of NVIDIA's hardware.
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP8 has blocks of {BLOCK}, and a last dimension of {values.shape[-1]} is not a multiple"
        )
    blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1)
    biased = _biased_exponents(largest, scale_mode) + _E8M0_BIAS
    biased = torch.where(largest.isnan(), _E8M0_NAN, biased)
    scales = biased.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantized(_codes(blocks, scales.to(torch.float32)[..., None]).flatten(-2), scales)


@torch.no_grad()
def quantize_rowwise(values: Tensor) -> Quantized:
    """Codes with one scale per row (all of the last dimension): the power of two above max / 448.

    Values of a row whose largest is far below 1e-12 become 0. A value that isn't finite makes its row NaN.
    """
    rows = values.to(torch.float32)
    largest = rows.abs().amax(dim=-1, keepdim=True)
    inverse = (E4M3_MAX / largest.to(torch.float64).clamp(min=_SMALLEST_ROW_MAX)).to(torch.float32)
    # 0.5 <= mantissa < 1, so this rounds down to a power of two; not finite values pass through.
    mantissas, _ = torch.frexp(inverse)
    scales = (2 * mantissas) / inverse
    # Not `where`: with no rows its result has a stride of 0, which can't be viewed as bytes.
    scales = scales.masked_fill(largest.isinf(), torch.inf)
    return Quantized(_codes(rows, scales), scales)


def rows_to_bytes(quantized: Quantized) -> Tensor:
    """All bits of each row as bytes: its codes, then its scales."""
    parts = quantized.codes, quantized.scales
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def rows_from_bytes(rows: Tensor, width: int, scale_dtype: torch.dtype) -> Quantized:
    """What `rows_to_bytes` was given: codes of `width` values per row, and scales of this type."""
    codes, scales = (
        part.clone(memory_format=torch.contiguous_format)
        for part in rows.tensor_split([width], dim=-1)
    )
    return Quantized(codes.view(torch.float8_e4m3fn), scales.view(scale_dtype))


def dequantize(quantized: Quantized) -> Tensor:
    """The values in float32."""
    scales = quantized.scales.to(torch.float32)
    values = _decoded(quantized.codes)
    values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return values


def _biased_exponents(largest: Tensor, scale_mode: str) -> Tensor:
    """Unbiased exponent of every block's scale; where the largest is NaN, anything."""
    if scale_mode == "rceil":
        # The smallest scale, so that neither zero nor a subnormal quotient needs a case of its own.
        quotients = (largest / E4M3_MAX).clamp(min=2.0**-127)
        mantissas, exponents = torch.frexp(quotients)
        # 0.5 <= mantissa < 1: a power of two itself is not rounded up.
        exponents = exponents - (2 * mantissas == 1).to(exponents.dtype)
        infinite = _E8M0_BIAS
    else:
        _, exponents = torch.frexp(largest)
        exponents = torch.where(largest == 0, -_E8M0_BIAS, exponents - 9)
        infinite = 120
    return torch.where(largest.isinf(), infinite, exponents.clamp(-_E8M0_BIAS, _E8M0_BIAS))


def _codes(values: Tensor, scales: Tensor) -> Tensor:
    # Clamping keeps NaN, and makes infinity over a finite scale the largest code.
    return (values / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _decoded(codes: Tensor) -> Tensor:
    if codes.is_cuda:
        return codes.to(torch.float32)
    # torch 2.13's cast from float8 is seven times slower on a CPU than this table.
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)
