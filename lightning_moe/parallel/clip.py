"""One gradient norm for the whole model, equal on all ranks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.multiply import multiply_
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.parallel.layout import ParamLayout


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
        stacked = _norms([gradient for gradient, _ in gradients], norm_type)
        if infinite:
            # The maximum of a number and NaN may be either, and differ between ranks; that with infinity is infinity.
            total = stacked.max().nan_to_num(nan=math.inf, posinf=math.inf)
        else:
            # As numbers: a tensor of them would be copied from the host, which waits.
            shares = [share for _, share in gradients]
            weighted = torch._foreach_mul(stacked.pow(norm_type).unbind(), shares)
            total = torch.stack(weighted).sum()
    world.all_reduce(total, "max" if infinite else "sum")
    return total if infinite else total.pow(1 / norm_type)


def _norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """One norm per tensor, computed in at least float32."""
    norms: list[Tensor] = [torch.empty(0)] * len(gradients)
    places: dict[torch.dtype, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(at_least_float32(gradient.dtype), []).append(place)
    for dtype, own in places.items():
        found = torch._foreach_norm([gradients[place] for place in own], norm_type, dtype=dtype)
        for place, norm in zip(own, found, strict=True):
            norms[place] = norm.to(torch.float64)
    return torch.stack(norms)


def clip_(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm becomes at most `max_norm`; torch's formula and epsilon."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiply_(gradients, coefficient)


class GradientNorm:
    """The norm of an optimizer's gradients over all ranks, and clipping by it.

    Args:
        layout: of the module.
        targets: by name, parameters of optimizers that aren't the module's own.
        device: where norms live.
    """

    def __init__(
        self, layout: ParamLayout, targets: Mapping[str, nn.Parameter], device: torch.device
    ) -> None:
        self._world = layout.mesh.world
        self._device = device
        self._shares = {
            targets.get(name, layout.parameters[name]): spec.norm_share
            for name, spec in layout.specs.items()
        }

    def of(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm, each element of the model once; equal on all ranks."""
        gradients = [
            (p.grad, self._shares[p]) for p in _parameters(optimizer) if p.grad is not None
        ]
        return global_norm(gradients, self._world, norm_type=norm_type, device=self._device)

    def clip_(self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients in place so that their norm becomes at most `max_norm`; gives the norm before."""
        norm = self.of(optimizer, norm_type)
        clip_([p.grad for p in _parameters(optimizer) if p.grad is not None], norm, max_norm)
        return norm


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
