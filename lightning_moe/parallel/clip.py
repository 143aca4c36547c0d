"""One gradient norm for the whole model, equal on all ranks."""

import math

import torch
from torch import Tensor

from lightning_moe.ops.scale import scale_
from lightning_moe.parallel.collectives import AxisGroup


def global_norm(
    gradients: list[tuple[Tensor, float]],
    world: AxisGroup,
    *,
    norm_type: float = 2.0,
    device: torch.device,
) -> Tensor:
    """The p-norm over every element of the model once, in float64 (0-d), with the same bits on all ranks.

    Args:
        gradients: this rank's parts, each with its `ParamSpec.norm_share`: 1 for a part that no other rank holds,
            1/replicas for one that they all hold.
        world: all ranks.
        norm_type: p, at least 1; `inf` for the largest absolute value.
        device: where the result lives, also without gradients.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    infinite = math.isinf(norm_type)
    if gradients:
        norms = torch._foreach_norm([gradient for gradient, _ in gradients], norm_type)
        stacked = torch.stack([norm.to(torch.float64) for norm in norms])
        if infinite:
            total = stacked.max()
        else:
            shares = torch.tensor(
                [share for _, share in gradients], dtype=torch.float64, device=device
            )
            total = (stacked.pow(norm_type) * shares).sum()
    world.all_reduce(total, "max" if infinite else "sum")
    return total if infinite else total.pow(1 / norm_type)


def clip_(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm becomes at most `max_norm`; torch's formula and epsilon."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_(gradients, coefficient)
