"""Cross-entropy and z-loss of the head, a chunk of tokens at a time."""

import math

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import chunked_cross_entropy, cross_entropy
from tests.kit import reference

IGNORED = -100


def _inputs(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Seven tokens of width 5, eleven words; tokens 1 and 6 have no label."""
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    head = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    return hidden, head, torch.tensor([3, IGNORED, 0, 10, 3, 7, IGNORED])


def test_uniform_logits_cost_log_v_per_labelled_token() -> None:
    loss = chunked_cross_entropy(
        torch.zeros(4, 3), torch.zeros(9, 3), torch.tensor([0, 8, -100, 2])
    )
    torch.testing.assert_close(loss.cross_entropy, torch.tensor(3 * math.log(9)))
    torch.testing.assert_close(loss.logz_squared, torch.tensor(3 * math.log(9) ** 2))
    assert torch.equal(loss.total, loss.cross_entropy)


def test_two_words_by_hand() -> None:
    # Logits (2, 0), label 1: log(e^2 + 1) - 0.
    hidden, head = torch.tensor([[2.0]]).double(), torch.tensor([[1.0], [0.0]]).double()
    loss = chunked_cross_entropy(hidden, head, torch.tensor([1]), z_weight=0.5)
    logz = math.log(math.exp(2) + 1)
    assert loss.cross_entropy.item() == pytest.approx(logz)
    assert loss.total.item() == pytest.approx(logz + 0.5 * logz**2)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_values_and_gradients_equal_the_reference_for_any_chunk(
    rows_per_chunk: int,
    z_weight: float,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 11 * rows_per_chunk)
    hidden, head, labels = _inputs(generator)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    loss = chunked_cross_entropy(*leaves, labels, z_weight=z_weight)
    logits = hidden @ head.t()
    expected = reference.cross_entropy(logits, labels)
    labelled = logits[labels != IGNORED]
    squares = sum(reference.log_partition(row) ** 2 for row in labelled)
    torch.testing.assert_close(loss.cross_entropy, expected.detach())
    torch.testing.assert_close(loss.logz_squared, squares.detach())
    total = expected + z_weight * squares
    torch.testing.assert_close(loss.total, total)
    # A factor, as a training step divides its loss.
    ours = torch.autograd.grad(loss.total / 8, leaves)
    for gradient, wanted in zip(ours, torch.autograd.grad(total / 8, leaves), strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_gradient_of_the_total(z_weight: float, generator: torch.Generator) -> None:
    hidden, head, labels = _inputs(generator)

    def total(hidden: Tensor, head: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, head, labels, z_weight=z_weight).total

    assert torch.autograd.gradcheck(total, (hidden.requires_grad_(), head.requires_grad_()))


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_wanted_gradient_is_needed(wanted: int, generator: torch.Generator) -> None:
    hidden, head, labels = _inputs(generator)
    leaf = (hidden, head)[wanted].requires_grad_()
    (ours,) = torch.autograd.grad(chunked_cross_entropy(hidden, head, labels).total, leaf)
    expected = reference.cross_entropy(hidden @ head.t(), labels)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaf)[0])


def test_only_the_total_carries_gradient(generator: torch.Generator) -> None:
    hidden, head, labels = _inputs(generator)
    loss = chunked_cross_entropy(hidden.requires_grad_(), head, labels)
    assert loss.total.requires_grad
    assert not loss.cross_entropy.requires_grad
    assert not loss.logz_squared.requires_grad


@pytest.mark.parametrize("labels", [torch.zeros(0, dtype=torch.int64), torch.full((3,), IGNORED)])
def test_nothing_labelled_costs_nothing_and_pulls_nowhere(labels: Tensor) -> None:
    hidden = torch.ones(len(labels), 5, requires_grad=True)
    head = torch.ones(11, 5, requires_grad=True)
    loss = chunked_cross_entropy(hidden, head, labels, z_weight=0.1)
    loss.total.backward()
    assert (loss.total.item(), loss.cross_entropy.item(), loss.logz_squared.item()) == (0, 0, 0)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.grad, torch.zeros_like(head))


def test_unlabelled_tokens_with_infinite_logits_change_nothing(generator: torch.Generator) -> None:
    hidden, head, labels = _inputs(generator)
    expected = chunked_cross_entropy(hidden, head, labels, z_weight=0.3).total
    hidden[1] = torch.inf
    loss = chunked_cross_entropy(hidden, head, labels, z_weight=0.3)
    torch.testing.assert_close(loss.total, expected)


def test_large_logits_stay_finite() -> None:
    loss = chunked_cross_entropy(
        torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([1])
    )
    assert loss.total.item() == 2e4


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    # log 9 is 2.1972; bfloat16 has 2.1875 and 2.2031.
    low = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(9, 3, dtype=torch.bfloat16)
    loss = chunked_cross_entropy(*low, torch.tensor([0, 8, IGNORED, 2]), z_weight=1.0)
    expected = 3 * math.log(9) + 3 * math.log(9) ** 2
    torch.testing.assert_close(loss.total, torch.tensor(expected))


def test_bfloat16_is_summed_in_float32_and_gradients_keep_their_types(
    generator: torch.Generator,
) -> None:
    hidden, head, labels = _inputs(generator)
    low = hidden.bfloat16().requires_grad_(), head.bfloat16().requires_grad_()
    loss = chunked_cross_entropy(*low, labels)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert [leaf.grad.dtype for leaf in low] == [torch.bfloat16, torch.bfloat16]
    exact = [leaf.detach().double().requires_grad_() for leaf in low]
    expected = reference.cross_entropy(exact[0] @ exact[1].t(), labels)
    expected.backward()
    # Logits of about 5 rounded to bfloat16: 2^-9 relative each.
    torch.testing.assert_close(loss.total.double(), expected, rtol=1e-2, atol=0)
    for ours, wanted in zip(low, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), wanted.grad, rtol=2e-2, atol=2e-2)


def test_autocast_computes_the_logits_in_its_own_type(generator: torch.Generator) -> None:
    hidden, head, labels = (t.float() if t.is_floating_point() else t for t in _inputs(generator))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = chunked_cross_entropy(hidden, head, labels)
    low = chunked_cross_entropy(hidden.bfloat16(), head.bfloat16(), labels)
    assert mixed.total.item() == low.total.item()
    leaf = hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunked_cross_entropy(leaf, head, labels).total.backward()
    assert leaf.grad.dtype == torch.float32
