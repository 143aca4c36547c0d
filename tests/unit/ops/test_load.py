"""How evenly experts are used."""

import pytest
import torch

from lightning_moe.ops import load_max_over_mean


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([3, 3, 3], 1.0),
        ([0, 0, 9], 3.0),
        ([2, 4], 4 / 3),
        ([7], 1.0),
        ([0, 0, 0, 0], 1.0),
        ([2**53 + 2, 0], 2.0),
    ],
)
def test_busiest_over_mean_by_hand(counts: list[int], expected: float) -> None:
    assert load_max_over_mean(torch.tensor(counts)).item() == pytest.approx(expected, rel=1e-15)
