"""How much memory the layer takes at once, against what any way to compute it must hold."""

import pytest
import torch

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from tests.kit.memory import LiveBytes, kept_bytes

TOKENS, EXPERTS = 2048, 8


def _floor(width: int, hidden: int, top_k: int) -> int:
    """Numbers alive in the most crowded step of backward: see `MoE`. Gradients of weights join others at once."""
    copies, matrix = TOKENS * top_k, EXPERTS * width * hidden
    steps = {
        "combine": copies * (3 * width + 2 * hidden),
        "down": copies * (2 * width + 3 * hidden) + matrix,
        "activation": copies * (width + 5 * hidden),
        "up": copies * (2 * width + 2 * hidden) + 2 * matrix,
    }
    return max(steps.values()) + TOKENS * width


@pytest.mark.parametrize(
    ("width", "hidden", "top_k", "dtype"),
    [
        (64, 64, 4, torch.float32),
        (128, 64, 4, torch.float32),
        (64, 128, 4, torch.float32),
        (128, 64, 4, torch.bfloat16),
    ],
)
def test_forward_and_backward_stay_near_the_least_memory_there_can_be(
    width: int, hidden: int, top_k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    config = MoEConfig(num_experts=EXPERTS, hidden_size=hidden, router=RouterConfig(top_k=top_k))
    layer = MoE(width, config).to(dtype)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, gradient = (torch.randn(TOKENS, width, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    with LiveBytes() as memory:
        y, _ = layer(x)
        y.backward(gradient)
    floor = _floor(width, hidden, top_k) * dtype.itemsize
    assert floor < memory.peak < 1.2 * floor


def test_what_forward_keeps_is_rows_both_halves_their_product_and_outputs(
    generator: torch.Generator,
) -> None:
    width, hidden, top_k = 64, 48, 4
    config = MoEConfig(num_experts=EXPERTS, hidden_size=hidden, router=RouterConfig(top_k=top_k))
    layer = MoE(width, config)
    x = torch.randn(TOKENS, width, generator=generator).requires_grad_()
    kept = kept_bytes(lambda: layer(x), without=(x, *layer.parameters()))
    copies = TOKENS * top_k * (2 * width + 3 * hidden) * 4
    # Scores, ids, weights and sorted places besides.
    assert copies < kept < 1.05 * copies
