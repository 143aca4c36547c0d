"""Rotary position embedding."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rope_angles(
    positions_S: Int[Tensor, " S"], head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "S C"]:
    """Angle (radians) of each position and channel; channels c and c + head_dim/2 turn together.

    Source: RoFormer, arXiv:2104.09864, in the half-split layout of GPT-NeoX.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=dtype) / head_dim
    angles = positions_S.to(dtype)[:, None] * theta**-exponents
    return torch.cat((angles, angles), dim=-1)


def apply_rope(
    x_BHSC: Float[Tensor, "B H S C"], cos_SC: Float[Tensor, "S C"], sin_SC: Float[Tensor, "S C"]
) -> Float[Tensor, "B H S C"]:
    """Queries or keys turned by their positions, computed in the angles' type, returned in their own."""
    wide = x_BHSC.to(cos_SC.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_SC + torch.cat((-second, first), dim=-1) * sin_SC).to(x_BHSC.dtype)
