"""The norm's arithmetic on one rank; tests/distributed has the rest."""

import math

import pytest
import torch

from lightning_moe.parallel.clip import clip_, global_norm
from lightning_moe.parallel.collectives import AxisGroup, Ledger

ALONE = AxisGroup("world", (0,), 0, None, Ledger())
CPU = torch.device("cpu")


def _gradients(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2, 3))]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norm_and_clipping_equal_torch(norm_type: float, generator: torch.Generator) -> None:
    gradients = _gradients(generator)
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.3, norm_type=norm_type)
    norm = global_norm([(g, 1.0) for g in gradients], ALONE, norm_type=norm_type, device=CPU)
    torch.testing.assert_close(norm, expected.double(), rtol=1e-6, atol=0.0)
    clip_(gradients, norm, 0.3)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_small_norm_leaves_gradients_exactly_as_they_are(generator: torch.Generator) -> None:
    gradients = _gradients(generator)
    before = [gradient.clone() for gradient in gradients]
    clip_(gradients, torch.tensor(0.5, dtype=torch.float64), 0.6)
    assert all(map(torch.equal, gradients, before))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_no_gradients_have_norm_zero(norm_type: float) -> None:
    norm = global_norm([], ALONE, norm_type=norm_type, device=CPU)
    assert norm.item() == 0.0
    clip_([], norm, 1.0)


def test_low_precision_gradients_are_measured_in_float32() -> None:
    """1000 elements of 1 and one of 8: a norm in bfloat16 would be 32.5 or so."""
    gradient = torch.ones(1001, dtype=torch.bfloat16)
    gradient[0] = 8.0
    norm = global_norm([(gradient, 1.0)], ALONE, device=CPU)
    torch.testing.assert_close(norm.item(), math.sqrt(1064), rtol=1e-6, atol=0.0)


def test_gradients_of_several_types_are_clipped_together() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)]
    norm = global_norm([(gradient, 1.0) for gradient in gradients], ALONE, device=CPU)
    clip_(gradients, norm, 1.0)
    torch.testing.assert_close([g.item() for g in gradients], [0.6, 0.8], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(bad: float, norm_type: float) -> None:
    gradients = [(torch.tensor([1.0, bad]), 1.0), (torch.ones(3), 1.0)]
    assert not global_norm(gradients, ALONE, norm_type=norm_type, device=CPU).isfinite()
