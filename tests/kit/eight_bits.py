"""Experts in eight bits, emulated, and what they compute."""

import pytest
import torch
from torch import Tensor

from lightning_moe.config import FP8Config, MoEConfig
from lightning_moe.nn import Experts
from tests.kit.randomized import randomized

EMULATED = FP8Config(emulate=True)
BACKENDS = pytest.mark.parametrize("backend", ["mxfp8", "fp8_rowwise"])
WIDTH, HIDDEN = 64, 32


def eight_bit_experts(
    backend: str, num_experts: int, *, seed: int = 0, fp8: FP8Config = EMULATED
) -> Experts:
    config = MoEConfig(num_experts=num_experts, hidden_size=HIDDEN, backend=backend, fp8=fp8)
    return randomized(Experts(WIDTH, config), torch.Generator().manual_seed(seed), std=0.2)


def outputs_and_gradients(
    experts: Experts, rows: Tensor, counts: list[int], upstream: Tensor
) -> list[Tensor]:
    """Output and the gradients of rows, w_up_gate and w_down."""
    leaves = [rows.clone().requires_grad_(), experts.w_up_gate, experts.w_down]
    out = experts(leaves[0], torch.tensor(counts))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
