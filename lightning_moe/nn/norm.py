"""The RMS norm of the whole package."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm, also where input and weight differ in type, as under autocast.

    Computes and returns the wider of both types. torch would do so too, but unfused and with a warning.
    """

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Every row over the root of its mean square, times the weight."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return nn.functional.rms_norm(
            x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps
        )
