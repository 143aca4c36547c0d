"""The reducer's messages: few, of bounded size, during backward, and in one order on all ranks."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.kit.ranks import run_ranks
from tests.kit.reducer_runs import Net, Setup, assert_gradients, make_tokens, mean_square
from tests.kit.spread_layers import Case


def _accumulated(rank: int, world: int, ep: int, split: bool) -> list[tuple[str, str]]:
    setup = Setup(Net(), world, ep, split=split)
    losses = [mean_square(setup.module, make_tokens(rank, micro)) / 3 for micro in range(3)]
    setup.ledger.order.clear()
    for micro, loss in enumerate(losses):
        setup.backward(loss, reduce=micro == 2)
        if micro < 2:
            assert not [kind for kind, _ in setup.ledger.order if "reduce" in kind]
    whole = Net()
    for micro in range(3):
        (
            mean_square(whole, torch.cat([make_tokens(r, micro) for r in range(world)])) / 3
        ).backward()
    assert_gradients(setup, whole)
    return [call for call in setup.ledger.order if "reduce" in call[0]]


@pytest.mark.parametrize(
    ("ep", "split", "expected"),
    [
        (1, False, [("all_reduce", "stage"), ("all_reduce", "ep_dp")]),
        (2, False, [("all_reduce", "stage")]),
        (1, True, [("reduce_scatter", "stage"), ("all_reduce", "stage"), ("all_reduce", "ep_dp")]),
        (2, True, [("reduce_scatter", "stage"), ("all_reduce", "stage")]),
    ],
)
def test_micro_batches_add_up_and_only_the_last_is_reduced_once_per_bucket(
    ep: int, split: bool, expected: list[tuple[str, str]]
) -> None:
    for calls in run_ranks(_accumulated, 2, ep, split):
        assert sorted(calls) == sorted(expected)


def _launches(rank: int, world: int, bucket_bytes: int) -> tuple[list[tuple[int, bool]], ...]:
    module = Net()
    del module.unused
    setup = Setup(module, world, 1, bucket_bytes=bucket_bytes)
    found = []
    for micro in range(2):
        setup.backward(mean_square(module, make_tokens(rank, micro)))
        found.append(list(setup.reducer.launches))
    return tuple(found)


def test_buckets_leave_during_backward_in_one_order_on_all_ranks_and_steps() -> None:
    first, second = run_ranks(_launches, 2, 3000)
    assert first == second
    assert first[0] == first[1]
    numbers = [number for number, _ in first[0]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 4
    assert all(in_backward for _, in_backward in first[0])


def _launches_with_unused(rank: int, world: int) -> list[tuple[int, bool]]:
    """Rank 0 uses `late` only, rank 1 `early` only."""
    module = nn.ParameterDict({"early": torch.ones(2), "late": torch.ones(3)})
    setup = Setup(module, world, 1, bucket_bytes=1)
    used = module["late"] if rank == 0 else module["early"]
    setup.backward(used.sum())
    torch.testing.assert_close(module["early"].grad, torch.full((2,), 0.5))
    torch.testing.assert_close(module["late"].grad, torch.full((3,), 0.5))
    return setup.reducer.launches


def test_ranks_that_use_different_parameters_still_reduce_in_the_same_order() -> None:
    first, second = run_ranks(_launches_with_unused, 2)
    # Backward meets the last parameter first; rank 1 has to wait for `finish`.
    assert first == [(0, True), (1, False)]
    assert second == [(0, False), (1, False)]


def _message_sizes(rank: int, world: int, split: bool, bucket_bytes: int) -> list[int]:
    setup = Setup(Net(), world, 1, split=split, bucket_bytes=bucket_bytes)
    loss = mean_square(setup.module, make_tokens(rank))
    setup.ledger.sizes.clear()
    setup.backward(loss)
    return setup.ledger.sizes


@pytest.mark.parametrize("split", [False, True])
def test_messages_respect_the_limit_unless_one_parameter_is_larger(split: bool) -> None:
    limit, flags = 7000, 8 * 12 * 2
    (sizes, _) = run_ranks(_message_sizes, 2, split, limit)
    largest = 8 * 768 * 6
    assert all(size <= limit + flags or largest <= size <= largest + flags for size in sizes)
    assert sum(size > limit + flags for size in sizes) == 2
    total = 8 * sum(p.numel() for p in Net().parameters())
    assert total <= sum(sizes) <= total + flags
    one_message, _ = run_ranks(_message_sizes, 2, split, 2**20)
    assert len(one_message) == (3 if split else 2)


def _order_by_layer(rank: int, world: int) -> list[tuple[str, str]]:
    """MoE first and dense last, or the other way round: groups differ, the order may not."""
    orders = []
    for layers in (["moe", "linear"], ["linear", "moe"]):
        torch.manual_seed(0)
        module = nn.ModuleDict(
            {n: Case().layer() if n == "moe" else nn.Linear(6, 6).double() for n in layers}
        )
        setup = Setup(module, world, 2, bucket_bytes=500)
        x = make_tokens(rank)
        for name in layers:
            x = module[name](x)[0] if name == "moe" else module[name](x)
        setup.ledger.order.clear()
        setup.backward(x.square().mean())
        orders.append(list(setup.ledger.order))
    return orders


def test_four_ranks_issue_reductions_of_both_groups_in_one_order() -> None:
    results = run_ranks(_order_by_layer, 4, timeout_s=120)
    assert all(before == after for before, after in pairwise(results))
    assert {axis for _, axis in results[0][0]} == {"stage", "ep_dp", "ep"}


def _detached(rank: int, world: int) -> None:
    module = nn.ParameterDict({"w": torch.zeros(3)})
    setup = Setup(module, world, 1)
    setup.reducer.detach()
    setup.ledger.clear()
    (float(rank) * module["w"].sum()).backward()
    assert module["w"].grad.unique().tolist() == [float(rank)]
    assert not setup.ledger.calls


def test_without_its_hooks_gradients_stay_local() -> None:
    run_ranks(_detached, 2)
