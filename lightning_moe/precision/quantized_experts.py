"""The experts in eight bits: forward and input gradients from codes, weight gradients from dequantized rows."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.config import FP8Config
from lightning_moe.ops.autograd import Context
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.ops.device import device_refusal
from lightning_moe.ops.expert_backend import ExpertSizes, ExpertWeights
from lightning_moe.ops.grouped_mm import torch_grouped_mm_waits, torch_weight_gradient
from lightning_moe.precision.formats import (
    BLOCK,
    Quantized,
    dequantize,
    quantize_mxfp8,
    quantize_rowwise,
    rows_from_bytes,
    rows_to_bytes,
)
from lightning_moe.precision.released import ReleasedParameter
from lightning_moe.precision.scaled_mm import ScaledMatmul, emulated_mm, mxfp8_mm, rowwise_mm
from lightning_moe.precision.weight_store import Quantize, WeightStore

if TYPE_CHECKING:

    class _Context(Context):
        recipe: "Recipe"
        dtypes: tuple[torch.dtype, torch.dtype]
        weights_back: tuple[Quantized, Quantized]

else:
    _Context = Context


# torch 2.13's scaled grouped matmul has kernels for 9.x and 10.x only.
_BELOW: Final = (11, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to compute in eight bits.

    Attributes:
        name: as in `model.moe.backend`.
        quantize: along the last dimension.
        scale_dtype: of its scales.
        matmul: of two quantized tensors.
        multiple: what widths must be multiples of.
        least: compute capability of the CUDA device, at least.
        emulate: whether `matmul` runs anywhere.
    """

    name: str
    quantize: Quantize
    scale_dtype: torch.dtype
    matmul: ScaledMatmul
    multiple: int
    least: tuple[int, int]
    emulate: bool


def mxfp8_backend(config: FP8Config) -> "QuantizedBackend":
    """Blocks of 32 values that share a power of two."""
    return QuantizedBackend(
        Recipe(
            name="mxfp8",
            quantize=partial(quantize_mxfp8, scale_mode=config.scale_mode),
            scale_dtype=torch.float8_e8m0fnu,
            matmul=emulated_mm if config.emulate else mxfp8_mm,
            multiple=BLOCK,
            least=(10, 0),
            emulate=config.emulate,
        ),
        fp8_only=config.fp8_only,
    )


def rowwise_backend(config: FP8Config) -> "QuantizedBackend":
    """Rows of activations and gradients, and columns of weights, that share a power of two."""
    return QuantizedBackend(
        Recipe(
            name="fp8_rowwise",
            quantize=quantize_rowwise,
            scale_dtype=torch.float32,
            matmul=emulated_mm if config.emulate else rowwise_mm,
            multiple=16,
            least=(9, 0),
            emulate=config.emulate,
        ),
        fp8_only=config.fp8_only,
    )


class QuantizedBackend:
    """An `ExpertBackend` with two weight stores.

    Args:
        recipe: formats and matmul.
        fp8_only: refuse to train weights that exist beside their codes.
    """

    def __init__(self, recipe: Recipe, *, fp8_only: bool = False) -> None:
        self.recipe = recipe
        self.fp8_only = fp8_only
        self.up_gate = WeightStore(recipe.quantize)
        self.down = WeightStore(recipe.quantize)

    @property
    def note(self) -> str:
        """See `ExpertBackend.note`."""
        return "emulated by float32 matmuls of the codes" if self.recipe.emulate else ""

    def host_waits(self, sizes: ExpertSizes) -> int:
        """See `ExpertBackend.host_waits`."""
        # Forward and gradients of rows are four products of codes, gradients of weights two in the type of the rows.
        of_codes = 4 * self.recipe.emulate * torch_grouped_mm_waits(torch.float32, sizes.device)
        return of_codes + 2 * torch_grouped_mm_waits(sizes.dtype, sizes.device)

    def refusal(self, sizes: ExpertSizes) -> str | None:
        """See `ExpertBackend.refusal`."""
        name, multiple = self.recipe.name, self.recipe.multiple
        if sizes.activation != "swiglu":
            return f"{name} computes swiglu only, not model.moe.activation={sizes.activation}"
        if sizes.bias:
            return f"{name} has no biases; set model.moe.expert_bias=false"
        if sizes.dtype not in (torch.float32, torch.bfloat16):
            return f"{name} takes rows in float32 or bfloat16, not in {sizes.dtype} (trainer.precision)"
        if sizes.width % multiple:
            return (
                f"{name} needs experts whose width is a multiple of {multiple}, not {sizes.width} "
                "(model.d_model, or model.moe.latent.latent_dim)"
            )
        if sizes.hidden % multiple:
            return f"{name} needs model.moe.hidden_size to be a multiple of {multiple}, not {sizes.hidden}"
        return None if self.recipe.emulate else self._device_refusal(sizes.device)

    def _device_refusal(self, device: torch.device) -> str | None:
        remedy = (
            "set model.moe.fp8.emulate=true (emulate=True of MoEPrecision, if that asked) to compute with its "
            "codes in float32"
        )
        return device_refusal(
            self.recipe.name, device, least=self.recipe.least, below=_BELOW, remedy=remedy
        )

    @outside_of_graphs
    def encode(self, x_TW: Float[Tensor, "T W"], dtype: torch.dtype) -> UInt8[Tensor, "T Z"]:
        """See `ExpertBackend.encode`: codes and scales, those that the rows would get at their experts."""
        return rows_to_bytes(self.recipe.quantize(x_TW.to(dtype)))

    @outside_of_graphs
    def __call__(
        self,
        rows_RW: Float[Tensor, "R W"],
        weights: ExpertWeights,
        counts_L: Int[Tensor, " L"],
        bytes_RZ: UInt8[Tensor, "R Z"] | None = None,
    ) -> Float[Tensor, "R W"]:
        """See `ExpertBackend.__call__`; kept out of compiled graphs."""
        if self.fp8_only and weights.training and torch.is_grad_enabled():
            _refuse_kept(weights)
        if bytes_RZ is None:
            rows = self.recipe.quantize(rows_RW)
        else:
            rows = rows_from_bytes(bytes_RZ, rows_RW.shape[1], self.recipe.scale_dtype)
        stores = (
            *self.up_gate.layouts(weights.w_up_gate_LPW, training=weights.training),
            *self.down.layouts(weights.w_down_LFW, training=weights.training),
        )
        out_RW: Tensor = _QuantizedExperts.apply(
            self.recipe,
            counts_L,
            rows_RW,
            weights.w_up_gate_LPW,
            weights.w_down_LFW,
            *_flat(rows, *stores),
        )
        return out_RW

    def forget(self) -> None:
        """See `ExpertBackend.forget`."""
        self.up_gate.forget()
        self.down.forget()


def _refuse_kept(weights: ExpertWeights) -> None:
    both = (weights.w_up_gate_LPW, weights.w_down_LFW)
    if not all(isinstance(weight, ReleasedParameter) for weight in both):
        raise RuntimeError(
            "model.moe.fp8.fp8_only=True trains inside of Trainer.fit with ExpertParallelStrategy only, whose "
            "optimizer keeps masters of the weights that it drops; use that strategy, or set "
            "model.moe.fp8.fp8_only=false"
        )


class _QuantizedExperts(torch.autograd.Function):
    """Autograd has no gradient for codes, and the activation is quantized before it is ever stored.

    Quantization passes gradients straight through. Of the activations the codes of the input and the packed product
    are kept; the hidden rows are computed again.
    """

    @staticmethod
    def forward(
        ctx: _Context, recipe: Recipe, counts_L: Tensor, rows_RW: Tensor, *tensors: Tensor
    ) -> Tensor:
        w_up_gate, w_down, *flat = tensors
        rows, up_gate, up_gate_back, down_back, down = _pairs(flat)
        packed_RP = recipe.matmul(rows, up_gate, counts_L, rows_RW.dtype)
        hidden = recipe.quantize(_swiglu(packed_RP))
        # Backward reads the codes, since a weight may change before it. They aren't saved as activations are, whose
        # hooks may copy them to the host: the stores keep them anyway.
        ctx.recipe, ctx.dtypes = recipe, (w_up_gate.dtype, w_down.dtype)
        ctx.weights_back = up_gate_back, down_back
        ctx.save_for_backward(counts_L, packed_RP, *_flat(rows))
        return recipe.matmul(hidden, down, counts_L, rows_RW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_RW: Tensor) -> tuple[Tensor | None, ...]:
        recipe = ctx.recipe
        up_gate_dtype, down_dtype = ctx.dtypes
        up_gate_back, down_back = ctx.weights_back
        counts_L, packed_RP, *flat = ctx.saved_tensors
        (rows,) = _pairs(flat)
        dtype = grad_RW.dtype
        grad_rows = grad_up_gate = grad_down = None
        if ctx.needs_input_grad[4]:
            hidden_RF = dequantize(recipe.quantize(_swiglu(packed_RP))).to(dtype)
            grad_down = torch_weight_gradient(hidden_RF, grad_RW.contiguous(), counts_L)
            grad_down = grad_down.to(down_dtype)
        grad_hidden_RF = recipe.matmul(recipe.quantize(grad_RW), down_back, counts_L, torch.float32)
        grad_packed_RP = _swiglu_backward(packed_RP, grad_hidden_RF)
        if ctx.needs_input_grad[3]:
            grad_up_gate = torch_weight_gradient(
                grad_packed_RP.to(dtype), dequantize(rows).to(dtype), counts_L
            ).to(up_gate_dtype)
        if ctx.needs_input_grad[2]:
            grad_rows = recipe.matmul(
                recipe.quantize(grad_packed_RP), up_gate_back, counts_L, dtype
            )
        return None, None, grad_rows, grad_up_gate, grad_down, *[None] * 10


def _swiglu(packed_RP: Tensor) -> Tensor:
    """As `ops.swiglu`, in float32 and without gradient."""
    up_RF, gate_RF = packed_RP.to(torch.float32).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_RF).mul_(up_RF)


def _swiglu_backward(packed_RP: Tensor, grad_RF: Tensor) -> Tensor:
    up_RF, gate_RF = packed_RP.to(torch.float32).chunk(2, dim=-1)
    share_RF = gate_RF.sigmoid()
    silu_RF = gate_RF * share_RF
    slope_RF = share_RF * (1 + gate_RF - silu_RF)
    return torch.cat([grad_RF * silu_RF, grad_RF * up_RF * slope_RF], dim=-1)


def _flat(*quantized: Quantized) -> list[Tensor]:
    return [tensor for pair in quantized for tensor in (pair.codes, pair.scales)]


def _pairs(tensors: list[Tensor]) -> list[Quantized]:
    return [
        Quantized(codes, scales) for codes, scales in zip(tensors[::2], tensors[1::2], strict=True)
    ]
