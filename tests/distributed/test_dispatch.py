"""A layer spread over ranks is the layer on one rank: outputs, records and every gradient."""

from typing import Any

import pytest
import torch

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from lightning_moe.parallel.collectives import AxisGroup
from tests.kit.memory import LiveBytes
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import (
    BACKWARD,
    CASES,
    FORWARD,
    WIDTH,
    Case,
    assert_equals_one_rank,
    connect,
    objective,
    run,
    spread,
)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_outputs_records_and_every_gradient_equal_one_rank(
    world: int, name: str, dispatcher: str
) -> None:
    run_ranks(assert_equals_one_rank, world, CASES[name], dispatcher, timeout_s=120)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
@pytest.mark.parametrize(
    "name",
    ["plain", "one_expert_per_rank_at_most", "all_on_one_rank", "a_rank_without_tokens"],
)
def test_four_ranks_equal_one_rank(name: str, dispatcher: str) -> None:
    run_ranks(assert_equals_one_rank, 4, CASES[name], dispatcher, timeout_s=180)


def _received(rank: int, world: int) -> int:
    mesh, _ = connect(world)
    case = Case(crowded=(0, 1), tokens=(6,))
    layer = spread(case.layer(), mesh, "all_to_all")
    received: list[int] = []
    layer.experts.register_forward_pre_hook(lambda _, args: received.append(len(args[0])))
    layer(case.tokens_of(rank)[0])
    return received[0]


def test_a_rank_that_gets_everything_receives_every_copy_of_all_ranks() -> None:
    assert run_ranks(_received, 4, timeout_s=120) == [4 * 6 * 2, 0, 0, 0]


def _log_of_random_steps(rank: int, world: int, dispatcher: str) -> list[tuple[str, str]]:
    """Batches of 0 to 8 tokens, a different number on every rank, some of them in evaluation."""
    mesh, ledger = connect(world)
    layers = [spread(Case().layer(), mesh, dispatcher) for _ in range(2)]
    if dispatcher == "static":
        for layer in layers:
            layer.dispatcher.warmup(8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        size = int(torch.randint(9, (), generator=generator))
        x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            layer.train(step % 5 != 4)
        y, first = layers[0](x)
        z, second = layers[1](y)
        if step % 5 != 4:
            (z.sum() + first.score_sums_E[0] + second.score_sums_E[0]).backward()
    return ledger.order


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_the_order_of_collectives_does_not_depend_on_the_data(dispatcher: str) -> None:
    step = FORWARD[dispatcher] * 2 + BACKWARD * 2
    evaluation = FORWARD["all_to_all"] * 2
    expected = (step * 4 + evaluation) * 6
    for log in run_ranks(_log_of_random_steps, 2, dispatcher, timeout_s=120):
        assert log == expected


def _log_of_one_step(
    rank: int, world: int, dispatcher: str, recompute: bool
) -> tuple[list[Any], list[Any]]:
    mesh, ledger = connect(world)
    case = Case(recompute=recompute)
    layer = spread(case.layer(), mesh, dispatcher)
    if dispatcher == "static":
        layer.dispatcher.warmup(16, torch.device("cpu"))
    x, mix = case.tokens_of(rank)
    y, record = run(layer, x.requires_grad_(), recompute=recompute)
    forward = list(ledger.order)
    objective([(y, mix, record)]).backward()
    return forward, ledger.order[len(forward) :]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_backward_sends_rows_twice_and_counts_never(dispatcher: str) -> None:
    for forward, backward in run_ranks(_log_of_one_step, 2, dispatcher, False):
        assert forward == FORWARD[dispatcher]
        assert backward == BACKWARD


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_recomputation_repeats_the_forwards_collectives_on_all_ranks(dispatcher: str) -> None:
    for forward, backward in run_ranks(_log_of_one_step, 2, dispatcher, True):
        assert forward == FORWARD[dispatcher]
        assert backward == FORWARD[dispatcher] + BACKWARD


def _identity(rank: int, world: int, dispatcher: str) -> None:
    """The experts give back what they get; the weights of a token are a half each."""
    mesh, _ = connect(world)
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(5 + rank)])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer = spread(Case().layer(), mesh, dispatcher)
        # Not contiguous, as a slice of a wider tensor is.
        x_TW = torch.randn(5 + rank, 2 * WIDTH, generator=generator).to(dtype)[:, ::2]
        wide = torch.promote_types(dtype, torch.float32)
        weights_TK = torch.full(ids_TK.shape, 0.5, dtype=wide)
        flight = layer.dispatcher.dispatch(x_TW, ids_TK, weights_TK, 8)
        sent = layer.dispatcher.receive(flight)
        assert sent.rows_RW.dtype == dtype
        assert sent.counts_L.sum().item() == len(sent.rows_RW)
        assert torch.equal(layer.dispatcher.combine(sent.rows_RW, weights_TK, sent.back), x_TW)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_there_and_back_is_exactly_the_identity_in_every_float_type(
    world: int, dispatcher: str
) -> None:
    run_ranks(_identity, world, dispatcher, timeout_s=120)


def _rows_of_each_source(rank: int, world: int) -> list[list[float]]:
    """Rows (rank, token) with one copy each, to experts chosen by hand."""
    mesh, _ = connect(world)
    layer = spread(Case(num_experts=4, top_k=1).layer(), mesh, "all_to_all")
    ids_TK = torch.tensor([[1], [0], [3], [1]] if rank == 0 else [[1], [3], [0]])
    x_TW = torch.tensor([[float(rank), float(token)] for token in range(len(ids_TK))])
    flight = layer.dispatcher.dispatch(x_TW, ids_TK, torch.ones(ids_TK.shape), 4)
    sent = layer.dispatcher.receive(flight)
    return [sent.counts_L.tolist(), *sent.rows_RW.tolist()]


def test_rows_arrive_by_expert_then_source_then_token() -> None:
    first, second = run_ranks(_rows_of_each_source, 2)
    assert first == [[2, 3], [0, 1], [1, 2], [0, 0], [0, 3], [1, 0]]
    assert second == [[0, 2], [0, 2], [1, 1]]


def _message_beyond_limit(rank: int, world: int, limit: int) -> str | None:
    mesh, _ = connect(world)
    case = Case(crowded=(4, 5), tokens=(3, 4))
    layer = spread(case.layer(), mesh, "all_to_all", receive_limit=limit)
    try:
        layer(case.tokens_of(rank)[0])
    except RuntimeError as error:
        return str(error)
    return None


def test_more_rows_than_the_limit_are_the_same_error_on_all_ranks() -> None:
    first, second = run_ranks(_message_beyond_limit, 2, 13)
    assert first is not None
    assert "rank 1 would receive 14 rows" in first
    assert "strategy.receive_limit=13" in first
    assert first == second


def test_as_many_rows_as_the_limit_are_fine() -> None:
    assert run_ranks(_message_beyond_limit, 2, 14) == [None, None]


def _poisoned(rank: int, world: int, dispatcher: str) -> None:
    mesh, _ = connect(world)
    case = Case(options={"shared": None})
    layer = spread(case.layer(), mesh, dispatcher)
    x, _ = case.tokens_of(rank)
    clean, _ = layer(x)
    if rank == 1:
        x[2] = float("nan")
    y, _ = layer(x)
    others = torch.arange(len(x)) != (2 if rank == 1 else -1)
    torch.testing.assert_close(y[others], clean[others], rtol=1e-12, atol=1e-12)
    assert y[~others].isnan().all()


@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_a_nan_token_stays_in_its_own_output(dispatcher: str) -> None:
    run_ranks(_poisoned, 2, dispatcher)


def _numbers_by_axis(rank: int, world: int) -> None:
    """Every collective of a group, against what it should give, in the types that configs allow."""
    mesh, _ = connect(world, ep=2)
    for group in (mesh.world, mesh.stage, mesh.ep, mesh.ep_dp):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            _check_collectives(group, rank, dtype)


def _check_collectives(group: AxisGroup, rank: int, dtype: torch.dtype) -> None:
    size = group.size
    assert group.ranks[group.index] == rank
    own = torch.tensor([rank, 1], dtype=dtype)
    for op, expected in (("sum", sum(group.ranks)), ("max", max(group.ranks))):
        reduced = own.clone()
        group.all_reduce(reduced, op)
        assert reduced[0].item() == expected
    everyone = torch.empty(size, 2, dtype=dtype)
    group.all_gather(everyone, own.view(1, 2))
    assert everyone[:, 0].tolist() == list(group.ranks)
    part = torch.empty(1, 2, dtype=dtype)
    group.reduce_scatter(part, own.expand(size, 2).contiguous())
    assert part.tolist() == [[sum(group.ranks), size]]
    # Rank i of the group gets i rows from each.
    splits = list(range(size))
    sent = own[:1].expand(sum(splits)).contiguous()
    received = torch.empty(group.index * size, dtype=dtype)
    group.all_to_all(received, sent, out_splits=[group.index] * size, in_splits=splits)
    assert received.tolist() == [r for r in group.ranks for _ in range(group.index)]
    first = own.clone()
    group.broadcast(first)
    assert first[0].item() == group.ranks[0]


def test_groups_of_every_axis_reach_exactly_their_ranks() -> None:
    run_ranks(_numbers_by_axis, 4, timeout_s=120)


def _peak_when_all_go_to_the_first_rank(rank: int, world: int, recompute: bool) -> tuple[int, int]:
    """Most bytes alive on this rank in one step, and what `AllToAllDispatcher` says they are at most.

    Of several steps the least: a thread of gloo can let go of what it has sent after the work is done, when it next
    gets the processor. That adds to a peak now and then, and never takes anything away.
    """
    mesh, _ = connect(world)
    width, hidden, top_k, tokens = 32, 48, 2, 256
    router = RouterConfig(top_k=top_k, score_correction_bias=True)
    layer = MoE(width, MoEConfig(num_experts=8, hidden_size=hidden, router=router))
    assert layer.router.score_bias is not None
    layer.router.score_bias[:2] += 100.0  # the first rank's
    spread(layer, mesh, "all_to_all")
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    gradient = torch.ones(tokens, width)
    peaks = []
    for _ in range(20):
        x.grad = None
        layer.zero_grad()
        with LiveBytes() as memory:
            y, _ = run(layer, x, recompute=recompute)
            y.backward(gradient)
            del y
        peaks.append(memory.peak)
    copies = tokens * top_k
    received = (world if rank == 0 else 0) * copies
    there = received * max(3 * width + 3 * hidden, width + 5 * hidden)
    here = 3 * (copies + tokens) * width
    return min(peaks), x.element_size() * (there + here)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peak_of_a_rank_that_gets_everything_is_bounded_by_its_rows(recompute: bool) -> None:
    for peak, at_most in run_ranks(_peak_when_all_go_to_the_first_rank, 4, recompute):
        assert peak < at_most
