"""Linear layers whose matmuls torchao computes in eight bits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_moe.config import LinearFormat, ScaleMode
from lightning_moe.ops.device import device_refusal
from lightning_moe.ops.dtypes import matmul_dtype
from lightning_moe.precision.formats import BLOCK

_MULTIPLES: Final[dict[LinearFormat, int]] = {
    "fp8_tensorwise": 16,
    "fp8_rowwise": 16,
    "mxfp8": BLOCK,
}
_CAPABILITIES: Final[dict[LinearFormat, tuple[int, int]]] = {
    "fp8_tensorwise": (8, 9),
    "fp8_rowwise": (9, 0),
    "mxfp8": (10, 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRecipe:
    """One way for linear layers to compute their output and both gradients in eight bits.

    Attributes:
        name: `fp8_tensorwise` or `fp8_rowwise`, the recipes of those names of `torchao.float8`, or `mxfp8`, torchao's
            MXFP8 training with scales of all three matmuls along the dimension that is summed.
        scale_mode: as in `model.moe.fp8.scale_mode`; `mxfp8` only.
        emulate: multiply the same codes in high precision, on any device.
    """

    name: LinearFormat
    scale_mode: ScaleMode = "rceil"
    emulate: bool = False

    def convert(self, linear: nn.Linear) -> nn.Linear:
        """A layer that computes in eight bits with the parameters, hooks and mode of `linear`.

        Both layers share them, so that a change of one is a change of the other. State dicts, optimizers and
        checkpoints see no difference.
        """
        converted = _to_mxfp8(linear, self) if self.name == "mxfp8" else _to_float8(linear, self)
        for name in vars(nn.Linear(1, 1, device="meta")):
            vars(converted)[name] = vars(linear)[name]
        return converted

    def width_refusal(self, linear: nn.Linear) -> str | None:
        """Why a layer of these widths can't be converted, or None if it can."""
        multiple = _MULTIPLES[self.name]
        if linear.in_features % multiple == linear.out_features % multiple == 0:
            return None
        return (
            f"it maps {linear.in_features} to {linear.out_features} features, and {self.name} needs both to be "
            f"multiples of {multiple}"
        )

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why rows of this type on this device can't be multiplied, or None if they can."""
        dtypes = [torch.bfloat16, torch.float32]
        if self.name == "mxfp8" and not self.emulate:
            # torchao's kernels read and write bfloat16 only.
            dtypes = [torch.bfloat16]
        if dtype not in dtypes:
            known = " or ".join(str(known).removeprefix("torch.") for known in dtypes)
            return (
                f"{self.name} takes rows in {known}, not in {str(dtype).removeprefix('torch.')}; set "
                "base='bf16-mixed' of MoEPrecision, which makes them bfloat16"
            )
        if self.emulate:
            return None
        return device_refusal(
            self.name,
            device,
            least=_CAPABILITIES[self.name],
            remedy="set emulate=True of MoEPrecision to compute with its codes in high precision",
        )


class MXFP8Linear(nn.Linear):
    """A linear layer around torchao's three MXFP8 matmuls; made by `LinearRecipe.convert`.

    torchao's own module of this name takes rows in multiples of 32 only and doesn't know autocast; its own conversion
    makes parameters of another kind. Here rows are padded with zeros, which change no result.

    Attributes:
        multiply: from rows (R, in) and a weight (out, in) of one type to (R, out).
    """

    def __init__(
        self, in_features: int, out_features: int, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(in_features, out_features, device="meta")
        self.multiply = multiply

    def forward(self, x: Float[Tensor, "*rows _"]) -> Float[Tensor, "*rows _"]:
        """As a linear layer, in the type of autocast if that is on."""
        dtype = matmul_dtype(x)
        rows = x.flatten(0, -2).to(dtype)
        num_rows = len(rows)
        if missing := -num_rows % BLOCK:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        # Both are in the type of autocast already, which doesn't cast torchao's tensors.
        y: Tensor = self.multiply(rows, self.weight.to(dtype))[:num_rows]
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*x.shape[:-1], self.out_features)


def _to_float8(linear: nn.Linear, recipe: LinearRecipe) -> nn.Linear:
    from torchao.float8 import (  # noqa: PLC0415 - takes seconds, serves only those who convert
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe.name.removeprefix("fp8_")),
        emulate=recipe.emulate,
        # The gradient of the weight sums over rows, and the last batch may have any number of them.
        pad_inner_dim=True,
    )
    converted: nn.Linear = convert_to_float8_training(linear, config=config)
    return converted


def _to_mxfp8(linear: nn.Linear, recipe: LinearRecipe) -> nn.Linear:
    from torchao.prototype.moe_training.mxfp8_linear import (  # noqa: PLC0415 - as above
        KernelPreference,
        ScaleCalculationMode,
        _to_mxfp8_then_scaled_mm,
    )

    multiply = partial(
        _to_mxfp8_then_scaled_mm,
        kernel_preference=KernelPreference.EMULATED if recipe.emulate else KernelPreference.AUTO,
        scale_calculation_mode=ScaleCalculationMode(recipe.scale_mode),
    )
    return MXFP8Linear(linear.in_features, linear.out_features, multiply)
