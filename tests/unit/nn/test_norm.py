"""The norms."""

import pytest
import torch

from lightning_moe.config import LatentNorm
from lightning_moe.nn.norm import NORMS, LayerNorm, RMSNorm
from tests.kit import reference


def test_norm_equals_the_reference(generator: torch.Generator) -> None:
    norm = RMSNorm(5, eps=0.1).double()
    x = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(5, generator=generator))
    for row, normed in zip(x.flatten(0, 1), norm(x).flatten(0, 1), strict=True):
        torch.testing.assert_close(normed, reference.rms_norm(row, norm.weight, 0.1))


def test_two_channels_by_hand() -> None:
    # Mean square 25 / 2.
    expected = torch.tensor([[3.0, 4.0]]) / 12.5**0.5
    torch.testing.assert_close(RMSNorm(2, eps=1e-12)(torch.tensor([[3.0, 4.0]])), expected)


def test_two_channels_of_a_layer_norm_by_hand() -> None:
    # Mean 3.5, variance 1 / 4.
    norm = LayerNorm(2, eps=1e-12)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[9.0, 21.0]]))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("given", "kept", "returned"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_the_wider_type_of_input_and_weight_is_returned(
    kind: LatentNorm, given: torch.dtype, kept: torch.dtype, returned: torch.dtype
) -> None:
    norm = NORMS[kind](4, bias=True).to(kept)
    assert norm(torch.ones(2, 4, dtype=given)).dtype == returned
