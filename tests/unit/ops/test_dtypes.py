"""Which float type a computation runs in."""

import pytest
import torch

from lightning_moe.ops.dtypes import at_least_float32, matmul_dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_nothing_is_below_float32_and_float64_stays(
    given: torch.dtype, expected: torch.dtype
) -> None:
    assert at_least_float32(given) == expected


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16])
def test_without_autocast_a_matmul_keeps_its_type(given: torch.dtype) -> None:
    assert matmul_dtype(torch.zeros(1, dtype=given)) == given


def test_autocast_decides_for_all_but_float64() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_dtype(torch.zeros(1)) == torch.bfloat16
        assert matmul_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert matmul_dtype(torch.zeros(1)) == torch.float32
