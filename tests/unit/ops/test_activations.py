"""Activations of the experts."""

import math

import pytest
import torch

from lightning_moe.ops import activation_function, gpt_oss_swiglu, relu2, swiglu
from tests.kit import reference


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_swiglu_by_hand() -> None:
    # [up, gate] halves: up = (3, 5), gate = (0, 2).
    out = swiglu(torch.tensor([[3.0, 5.0, 0.0, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(out, torch.tensor([[0.0, 5 * 2 * _sigmoid(2)]]).double())


def test_relu2_by_hand() -> None:
    assert relu2(torch.tensor([[-3.0, 0.0, 1.5]])).tolist() == [[0.0, 0.0, 2.25]]


def test_gpt_oss_swiglu_by_hand() -> None:
    # Interleaved (gate, up): (2, 3) and (-1, 0).
    out = gpt_oss_swiglu(torch.tensor([[2.0, 3.0, -1.0, 0.0]], dtype=torch.float64))
    expected = [4 * 2 * _sigmoid(1.702 * 2), -_sigmoid(-1.702)]
    torch.testing.assert_close(out, torch.tensor([expected], dtype=torch.float64))


def test_gpt_oss_limit_clamps_gate_above_and_up_on_both_sides() -> None:
    rows = torch.tensor([[9.0, 9.0], [-9.0, -9.0]], dtype=torch.float64)
    out = gpt_oss_swiglu(rows, alpha=1.0, limit=7.0)
    expected = [[8 * 7 * _sigmoid(7)], [-6 * -9 * _sigmoid(-9)]]
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["swiglu", "relu2", "gpt_oss_swiglu"])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_activation_equals_the_reference_row_by_row(
    name: str, num_rows: int, generator: torch.Generator
) -> None:
    rows = 3 * torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    limit = 1.0 if name == "gpt_oss_swiglu" else None
    out = activation_function(name, alpha=1.3, limit=limit)(rows)
    assert out.shape == (num_rows, 6 if name == "relu2" else 3)
    for row, activated in zip(rows, out, strict=True):
        torch.testing.assert_close(activated, reference.activate(row, name, alpha=1.3, limit=limit))


@pytest.mark.parametrize("name", ["swiglu", "relu2", "gpt_oss_swiglu"])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_gradient_of_activations(name: str, num_rows: int, generator: torch.Generator) -> None:
    rows = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation_function(name), (rows,))


def test_gradient_of_gpt_oss_swiglu_with_a_limit(generator: torch.Generator) -> None:
    rows = 3 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda rows: gpt_oss_swiglu(rows, limit=2.0), (rows.requires_grad_(),)
    )


def test_swiglu_takes_strided_inputs_and_expanded_gradients(generator: torch.Generator) -> None:
    wide = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    strided, dense = wide.t(), wide.t().contiguous()
    grads = []
    for rows in (strided, dense):
        leaf = rows.detach().requires_grad_()
        swiglu(leaf).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_swiglu_leaves_its_input_and_its_gradient_alone(generator: torch.Generator) -> None:
    rows = torch.randn(4, 6, generator=generator).requires_grad_()
    upstream = torch.randn(4, 3, generator=generator)
    before = rows.detach().clone(), upstream.clone()
    swiglu(rows).backward(upstream)
    assert torch.equal(rows, before[0])
    assert torch.equal(upstream, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_keeps_the_type_of_its_input(dtype: torch.dtype) -> None:
    rows = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    out = swiglu(rows)
    out.sum().backward()
    assert (out.dtype, rows.grad.dtype) == (dtype, dtype)
