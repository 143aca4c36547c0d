"""Modules with weights large enough to tell one path from another."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def randomized(module: M, generator: torch.Generator, *, std: float = 0.7) -> M:
    """Give every parameter, biases and norms included, and every expert bias random values.

    Initial weights are small and initial biases zero: an expert's output or a bias that is lost would hardly show.
    """
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    for name, buffer in module.named_buffers():
        if name.endswith("score_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return module
