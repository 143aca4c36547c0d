"""Router arithmetic, piece by piece."""

import math

import pytest
import torch

from lightning_moe.ops import routing
from tests.kit.memory import kept_bytes


def test_scores_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    softmax = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    torch.testing.assert_close(routing.router_scores(logits, "softmax"), softmax)
    torch.testing.assert_close(routing.router_scores(logits, "topk_softmax"), softmax)
    sigmoid = routing.router_scores(logits, "sigmoid", sigmoid_epsilon=0.5)
    torch.testing.assert_close(sigmoid, torch.tensor([[1.0, 1.25]], dtype=torch.float64))


def test_logits_are_a_matrix_product_plus_a_bias() -> None:
    x = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]])
    logits = routing.router_logits(x, weight, torch.tensor([0.5, 0.0, -1.0]))
    assert logits.tolist() == [[11.5, 2.0, 0.0]]


def test_logits_are_float32_under_autocast_and_for_low_precision() -> None:
    # Products that bfloat16 would round to the same number.
    x, weight = torch.tensor([[1.0]]), torch.tensor([[5.0], [5.004], [5.008]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = routing.router_logits(x, weight)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, weight.t())
    low = routing.router_logits(x.bfloat16(), weight)
    assert low.dtype == torch.float32
    assert torch.equal(low, weight.t())
    assert routing.router_logits(x.double(), weight).dtype == torch.float64


def test_group_limit_by_hand() -> None:
    # Sums of the two best: 9 + 1, 6 + 5, 2 + 8. The second group wins, then the first ties with the third.
    selection = torch.tensor([[9.0, 1.0, 0.0, 6.0, 5.0, 4.0, 2.0, 1.0, 8.0]])
    limited = routing.limit_to_groups(selection, num_groups=3, groups_kept=1)
    assert limited.isfinite().tolist() == [[False] * 3 + [True] * 3 + [False] * 3]
    limited = routing.limit_to_groups(selection, num_groups=3, groups_kept=2)
    assert limited.isfinite().tolist() == [[True] * 6 + [False] * 3]
    assert torch.equal(limited[:, :6], selection[:, :6])


def test_groups_of_one_expert_are_the_experts_themselves() -> None:
    limited = routing.limit_to_groups(torch.tensor([[0.1, 0.3, 0.2]]), num_groups=3, groups_kept=2)
    assert limited.isfinite().tolist() == [[False, True, True]]


def test_keeping_all_groups_changes_nothing_exactly(generator: torch.Generator) -> None:
    selection = torch.randn(4, 6, generator=generator)
    assert torch.equal(routing.limit_to_groups(selection, num_groups=2, groups_kept=2), selection)


def test_score_grid_has_steps_of_2_to_the_minus_14() -> None:
    step = 2.0**-14
    scores = torch.tensor([[0.0, 0.4, 0.6, 3.4, -1.6]]) * step
    assert (routing.to_score_grid(scores) / step).tolist() == [[0.0, 0.0, 1.0, 3.0, -2.0]]


def test_round_robin_by_hand() -> None:
    ids = routing.uniform_assignment(5, 2, 3, torch.device("cpu"))
    assert ids.tolist() == [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0]]


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(0, 2, 3), (6, 3, 3), (4, 1, 1)])
def test_round_robin_loads_experts_evenly(num_tokens: int, top_k: int, num_experts: int) -> None:
    ids = routing.uniform_assignment(num_tokens, top_k, num_experts, torch.device("cpu"))
    assert ids.shape == (num_tokens, top_k)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    counts = routing.count_experts(ids, num_experts)
    assert counts.tolist() == [num_tokens * top_k // num_experts] * num_experts


@pytest.mark.parametrize(
    ("norm_p", "expected"),
    [(None, [3.0, 4.0]), (1.0, [3 / 7, 4 / 7]), (2.0, [0.6, 0.8])],
)
def test_weights_are_divided_by_their_p_norm_then_scaled(
    norm_p: float | None, expected: list[float]
) -> None:
    chosen = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    wanted = torch.tensor([expected], dtype=torch.float64)
    torch.testing.assert_close(routing.expert_weights(chosen, norm_p=norm_p), wanted)
    scaled = routing.expert_weights(chosen, norm_p=norm_p, scale=2.5)
    torch.testing.assert_close(scaled, 2.5 * wanted)


@pytest.mark.parametrize("norm_p", [0.5, 1.0, 2.0, 8.0, 60.0])
def test_small_weights_have_a_norm_of_one(norm_p: float) -> None:
    chosen = torch.tensor([[1e-7, 0.5e-7], [2e-15, 1e-15], [0.5, 0.25]])
    expected = torch.tensor([[1.0, 0.5]]) / (1 + 0.5**norm_p) ** (1 / norm_p)
    weights = routing.expert_weights(chosen, norm_p=norm_p)
    torch.testing.assert_close(weights, expected.expand(3, 2))


def test_scores_that_rounding_made_0_come_from_their_logarithms() -> None:
    logs = torch.tensor([[-200.0, -201.0], [-1.0, -300.0]])
    kept = routing.away_from_zero(logs.exp(), logs)
    assert kept[1].tolist() == logs[1].exp().tolist()
    torch.testing.assert_close(kept[0], torch.tensor([1.0, math.exp(-1)]))


@pytest.mark.parametrize("epsilon", [0.0, 1e-7])
def test_logarithms_of_sigmoid_scores_by_hand(epsilon: float) -> None:
    logits = torch.tensor([[-120.0, 3.0]], dtype=torch.float64)
    expected = [math.log(1 / (1 + math.exp(-x)) + epsilon) for x in (-120.0, 3.0)]
    assert routing.log_sigmoid_scores(logits, epsilon).tolist()[0] == pytest.approx(expected)


def test_counts_by_hand_skip_ids_outside_the_range() -> None:
    ids = torch.tensor([[3, 0], [-1, -1], [3, 1], [7, 3]])
    counts = routing.count_experts(ids, 5)
    assert (counts.tolist(), counts.dtype) == ([1, 1, 0, 3, 0], torch.int64)


def test_counts_of_nothing_are_zero() -> None:
    assert routing.count_experts(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_router_logits_keep_their_input_as_it_came(generator: torch.Generator) -> None:
    x = torch.randn(7, 5, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(3, 5, generator=generator).requires_grad_()
    assert kept_bytes(lambda: routing.router_logits(x, weight), without=[weight]) == 7 * 5 * 2


def test_gradients_of_router_logits_pass_gradcheck(generator: torch.Generator) -> None:
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(routing.router_logits, (x, weight, bias))


def test_low_precision_router_logits_have_the_gradients_of_a_widened_matmul(
    generator: torch.Generator,
) -> None:
    x = torch.randn(7, 5, generator=generator).bfloat16()
    weight, mix = (torch.randn(3, n, generator=generator) for n in (5, 7))
    results = []
    for forward in (routing.router_logits, lambda x, w: x.float() @ w.float().t()):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = forward(*inputs)
        results.append((logits, *torch.autograd.grad((logits * mix.t()).sum(), inputs)))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected)


def test_the_margin_is_the_worst_chosen_score_minus_the_best_of_the_others() -> None:
    scores = torch.tensor([[5.0, 1.0, 4.0, 2.0], [1.0, -torch.inf, 3.0, -torch.inf]])
    ids = torch.tensor([[0, 3], [2, 0]])
    assert routing.selection_margin(scores, ids).tolist() == [-2.0, math.inf]
    assert routing.selection_margin(scores[:0], ids[:0]).tolist() == []


def test_the_entropy_of_scores_lies_between_certain_and_undecided() -> None:
    shares = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]]).double()
    wanted = torch.tensor([0.0, math.log(3), math.log(2)]).double()
    torch.testing.assert_close(routing.score_entropy(shares), wanted, rtol=1e-7, atol=0.0)
