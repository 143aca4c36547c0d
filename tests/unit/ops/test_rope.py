"""Rotary positions."""

import math

import torch

from lightning_moe.ops import apply_rope, rope_angles
from tests.kit import reference_model


def _turned(x: torch.Tensor, positions: torch.Tensor, theta: float = 100.0) -> torch.Tensor:
    angles = rope_angles(positions, x.shape[-1], theta, torch.float64)
    return apply_rope(x, angles.cos(), angles.sin())


def test_angles_by_hand() -> None:
    # Four channels: frequencies 1 and 100^(-1/2).
    angles = rope_angles(torch.tensor([0, 3]), 4, 100.0)
    torch.testing.assert_close(angles, torch.tensor([[0.0] * 4, [3.0, 0.3, 3.0, 0.3]]))


def test_a_quarter_turn_by_hand() -> None:
    angles = torch.full((1, 2), math.pi / 2, dtype=torch.float64)
    x = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 1, 1, 2)
    turned = apply_rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.flatten(), torch.tensor([-5.0, 3.0]).double())


def test_every_head_equals_the_reference(generator: torch.Generator) -> None:
    x = torch.randn(2, 3, 5, 6, generator=generator, dtype=torch.float64)
    turned = _turned(x, torch.arange(5))
    for sequence in range(2):
        for head in range(3):
            for position in range(5):
                expected = reference_model.rope(x[sequence, head, position], position, 100.0)
                torch.testing.assert_close(turned[sequence, head, position], expected)


def test_products_depend_on_distance_only_and_lengths_on_nothing(
    generator: torch.Generator,
) -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, generator=generator, dtype=torch.float64)

    def product(query: int, key: int) -> torch.Tensor:
        pair = _turned(q, torch.tensor([query])), _turned(k, torch.tensor([key]))
        return (pair[0] * pair[1]).sum()

    torch.testing.assert_close(product(9, 4), product(25, 20))
    assert abs(product(9, 4) - product(9, 5)) > 1e-3
    torch.testing.assert_close(_turned(q, torch.tensor([17])).norm(), q.norm())


def test_low_precision_is_turned_in_the_type_of_the_angles(generator: torch.Generator) -> None:
    x = torch.randn(1, 2, 4, 6, generator=generator).bfloat16()
    angles = rope_angles(torch.arange(4), 6, 100.0)
    turned = apply_rope(x, angles.cos(), angles.sin())
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), angles.cos(), angles.sin()).bfloat16())


def test_no_positions_are_no_rows() -> None:
    assert _turned(torch.zeros(1, 2, 0, 4).double(), torch.arange(0)).shape == (1, 2, 0, 4)
