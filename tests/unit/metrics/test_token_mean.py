"""A mean per token that unequal batches and ranks don't bend."""

import math

import pytest
import torch

from lightning_moe.metrics import TokenMean
from tests.kit.ranks import run_ranks

# (sum, tokens) of each batch.
BATCHES = [(6.0, 2), (4.0, 5), (0.0, 0), (1.5, 1)]


def _update(metric: TokenMean, batches: list[tuple[float, int]]) -> None:
    for total, num_tokens in batches:
        metric.update(torch.tensor(total), torch.tensor(num_tokens))


def test_unequal_batches_count_by_their_tokens() -> None:
    metric = TokenMean()
    _update(metric, BATCHES)
    assert metric.compute().item() == 11.5 / 8


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_it_is_no_number_before_the_first_token() -> None:
    assert math.isnan(TokenMean().compute().item())


def test_many_small_sums_do_not_get_lost_beside_a_large_one() -> None:
    metric = TokenMean()
    _update(metric, [(2.0**24, 1), *[(1.0, 1)] * 64])
    assert metric.compute().item() == (2**24 + 64) / 65


def test_a_graph_is_not_kept_alive() -> None:
    metric = TokenMean()
    metric.update(torch.tensor(1.0, requires_grad=True) * 2, torch.tensor(1))
    assert not metric.total.requires_grad


def test_after_a_reset_it_starts_anew() -> None:
    metric = TokenMean()
    _update(metric, BATCHES)
    metric.reset()
    _update(metric, [(3.0, 4)])
    assert metric.compute().item() == 0.75


def test_it_is_no_part_of_a_state_dict() -> None:
    assert TokenMean().state_dict() == {}


def _mean_on_rank(rank: int, world: int) -> float:
    metric = TokenMean()
    # Two batches on one rank, one on the other.
    _update(metric, [BATCHES[:2], BATCHES[3:]][rank])
    return metric.compute().item()


def test_two_ranks_give_the_mean_over_the_tokens_of_both() -> None:
    assert run_ranks(_mean_on_rank, 2) == [11.5 / 8] * 2
