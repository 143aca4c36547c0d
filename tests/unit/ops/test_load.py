"""How evenly experts are used."""

import math

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import load

STATISTICS = [
    load.load_max_over_mean,
    load.max_violation,
    load.load_entropy,
    load.entropy_imbalance,
    load.load_variation,
    load.dead_share,
]


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
    assert load.load_max_over_mean(torch.tensor(counts)).item() == pytest.approx(
        expected, rel=1e-15
    )
    assert load.max_violation(torch.tensor(counts)).item() == pytest.approx(expected - 1, abs=1e-15)


@pytest.mark.parametrize(
    ("counts", "entropy", "imbalance", "variation", "dead"),
    [
        ([3, 3, 3], math.log(3), 0.0, 0.0, 0.0),
        ([0, 9, 0, 0], 0.0, 1.0, math.sqrt(3), 0.75),
        ([4, 4, 0, 0], math.log(2), 0.5, 1.0, 0.5),
        # log2 4 - 3/4 log2 3 bits of at most 1.
        ([1, 3], math.log(4) - 0.75 * math.log(3), 0.75 * math.log2(3) - 1, 0.5, 0.0),
        ([7], 0.0, 0.0, 0.0, 0.0),
        ([0, 0], math.log(2), 0.0, 0.0, 0.0),
    ],
)
def test_entropy_imbalance_variation_and_dead_experts_by_hand(
    counts: list[int], entropy: float, imbalance: float, variation: float, dead: float
) -> None:
    counts_E = torch.tensor(counts)
    assert load.load_entropy(counts_E).item() == pytest.approx(entropy, abs=1e-12)
    assert load.entropy_imbalance(counts_E).item() == pytest.approx(imbalance, abs=1e-12)
    assert load.load_variation(counts_E).item() == pytest.approx(variation, abs=1e-12)
    assert load.dead_share(counts_E).item() == dead


@pytest.mark.parametrize("statistic", STATISTICS)
def test_several_layers_at_once_are_each_by_itself(
    statistic: object, generator: torch.Generator
) -> None:
    counts = torch.randint(9, (2, 3, 5), generator=generator)
    together = statistic(counts)
    assert together.dtype == torch.float64
    one_by_one = [statistic(counts_E) for counts_E in counts.flatten(0, 1)]
    torch.testing.assert_close(together.flatten(), torch.stack(one_by_one))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_neither_order_nor_amount_of_the_counts_matters(
    statistic: object, generator: torch.Generator
) -> None:
    counts = torch.randint(9, (5,), generator=generator)
    other = counts[torch.randperm(5, generator=generator)] * 7
    torch.testing.assert_close(statistic(other), statistic(counts))


def test_the_share_of_dropped_routes_is_over_all_experts() -> None:
    requested, kept = torch.tensor([[6, 2], [0, 0]]), torch.tensor([[3, 2], [0, 0]])
    assert load.drop_rate(requested, kept).tolist() == [3 / 8, 0.0]


def test_experts_that_are_uneven_may_lie_on_ranks_that_are_even() -> None:
    counts = torch.tensor([8, 0, 8, 0])
    assert load.load_max_over_mean(counts).item() == 2.0
    assert load.rank_loads(counts, 2).tolist() == [8, 8]
    assert load.rank_loads(counts, 1).tolist() == [16]
    assert load.rank_loads(torch.tensor([[8, 0, 1, 2]] * 3), 2).tolist() == [[8, 3]] * 3


@pytest.mark.parametrize("num_ranks", [0, 3])
def test_experts_that_do_not_divide_over_ranks_are_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"4 experts don't spread evenly over {num_ranks} ranks"):
        load.rank_loads(torch.zeros(4, dtype=torch.int64), num_ranks)


def _loss(requested: Tensor, score_sums: Tensor) -> float:
    """E * sum f P, written out."""
    num_experts, copies, tokens = len(requested), sum(requested.tolist()), sum(score_sums.tolist())
    pairs = zip(requested.tolist(), score_sums.tolist(), strict=True)
    return num_experts * sum(count / copies * score / tokens for count, score in pairs)


def test_the_balance_loss_is_one_plus_the_inner_product(generator: torch.Generator) -> None:
    for _ in range(5):
        requested = torch.randint(9, (6,), generator=generator) + 1
        score_sums = torch.rand(6, generator=generator, dtype=torch.float64)
        inner = load.balance_inner_product(requested, score_sums).item()
        assert 1 + inner == pytest.approx(_loss(requested, score_sums), abs=1e-12)


@pytest.mark.parametrize(
    ("requested", "score_sums"), [([9, 0, 0], [2.0, 2.0, 2.0]), ([3, 3, 3], [5.0, 1.0, 0.0])]
)
def test_the_loss_is_blind_where_either_side_is_even(
    requested: list[int], score_sums: list[float]
) -> None:
    inner = load.balance_inner_product(torch.tensor(requested), torch.tensor(score_sums))
    assert inner.item() == pytest.approx(0.0, abs=1e-15)


def test_without_tokens_the_inner_product_is_zero() -> None:
    inner = load.balance_inner_product(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
    assert inner.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_two_experts_of_which_one_wins_by_a_hair(share: float) -> None:
    """A share x of tokens is sure of expert 0; the others prefer expert 1 by nothing: 1 - x + 2 x^2, least at 1/4."""
    requested = torch.tensor([100 * share, 100 * (1 - share)]).long()
    scores = torch.tensor([100 * (1 + share) / 2, 100 * (1 - share) / 2], dtype=torch.float64)
    loss = 1 + load.balance_inner_product(requested, scores).item()
    assert loss == pytest.approx(1 - share + 2 * share**2, abs=1e-12)
    assert loss >= 7 / 8
    assert (loss == 7 / 8) == (share == 0.25)
