"""The norms of the whole package."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_moe.config import LatentNorm


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm, with a bias if wanted, also where input and weight differ in type, as under autocast.

    Computes and returns the wider of both types. torch would do so too, but unfused and with a warning.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, *, eps: float | None = None, bias: bool = False) -> None:
        super().__init__(width, eps=eps)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Every row over the root of its mean square, times the weight, plus the bias."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        y = nn.functional.rms_norm(
            x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps
        )
        return y if self.bias is None else y + self.bias.to(dtype)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, also where input and weight differ in type, for which torch has an error."""

    def __init__(self, width: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(width, eps=eps, bias=bias)

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Every row less its mean, over the root of its variance, times the weight, plus the bias."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.layer_norm(
            x.to(dtype), self.normalized_shape, self.weight.to(dtype), bias, self.eps
        )


NORMS: Final[dict[LatentNorm, type[RMSNorm] | type[LayerNorm]]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
}
