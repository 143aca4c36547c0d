"""Dispatch with fixed shapes: what is dropped, what is not, and that nothing waits for the device."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from tests.kit.host_syncs import HostSyncs
from tests.kit.ranks import run_ranks
from tests.kit.reference import expert as one_expert
from tests.kit.spread_layers import WIDTH, Case, connect, run, spread

CPU = torch.device("cpu")


def test_the_detector_of_host_syncs_works() -> None:
    x = torch.arange(3.0)
    with HostSyncs() as syncs:
        float(x.sum())
        bool(x[0] > 0)
        x[x > 1]
        x.nonzero()
        x.tolist()
        torch.tensor(3)
        x.repeat_interleave(torch.ones(3, dtype=torch.int64), output_size=3)
        (x * 2).sum()
    assert syncs.found == [
        "item",
        "item",
        "boolean index",
        "nonzero",
        "tolist",
        "copy from the host",
    ]
    assert torch.Tensor.tolist(x) == [0.0, 1.0, 2.0]


def _syncs_of_one_step(rank: int, world: int, dispatcher: str) -> tuple[list[str], list[str]]:
    """Of forward and backward after a first batch, with the grouped matmul that needs no sync."""
    mesh, _ = connect(world)
    router = RouterConfig(top_k=2, score_correction_bias=True, normalize_expert_weights=1.0)
    config = MoEConfig(
        num_experts=4, hidden_size=8, router=router, backend="torch", expert_bias=True
    )
    torch.manual_seed(0)
    layer = spread(MoE(8, config), mesh, dispatcher)
    generator = torch.Generator().manual_seed(rank)
    forward, backward = HostSyncs(), HostSyncs()
    for size, watched in ((9, False), (9, True)):
        x = torch.randn(size, 8, generator=generator, requires_grad=True)
        if not watched:
            layer(x)[0].sum().backward()
            continue
        with forward:
            y, record = layer(x)
        loss = (y * y).sum() + record.score_sums_E[0]
        with backward:
            loss.backward()
    return forward.found, backward.found


@pytest.mark.parametrize("world", [1, 2])
def test_static_dispatch_never_waits_for_the_device(world: int) -> None:
    for forward, backward in run_ranks(_syncs_of_one_step, world, "static"):
        assert (forward, backward) == ([], [])


def test_all_to_all_waits_exactly_once_per_layer_and_never_in_backward() -> None:
    for forward, backward in run_ranks(_syncs_of_one_step, 2, "all_to_all"):
        assert (forward, backward) == (["tolist"], [])


def _expected_drops(ids_TK: Tensor, weights_TK: Tensor, capacity: int, overflow: str) -> Tensor:
    """(T, K) whether a copy is kept, one expert after the other."""
    kept_TK = torch.zeros_like(ids_TK, dtype=torch.bool)
    for expert in range(8):
        copies = (ids_TK == expert).nonzero().tolist()
        if overflow == "weight":
            copies.sort(key=lambda copy: -weights_TK[copy[0], copy[1]].item())
        for token, choice in copies[:capacity]:
            kept_TK[token, choice] = True
    return kept_TK


def _drops(rank: int, world: int, overflow: str) -> None:
    """20 and 30 tokens, 2 choices of 8 experts, factor 1: ceil(2 * 30 / 8) = 8 slots per expert and source."""
    mesh, _ = connect(world)
    case = Case(tokens=(20, 30), crowded=(1,), options={"expert_bias": True})
    whole = case.layer()
    layer = spread(case.layer(), mesh, "static", capacity_factor=1.0, overflow=overflow)
    x, mix = case.tokens_of(rank)
    x.requires_grad_()
    y, record = layer(x)
    (y * mix).sum().backward()
    weights_TK, ids_TK, _ = whole.router(x.detach())
    assert (ids_TK == 1).any(dim=1).all()  # expert 1 is chosen by every token
    kept_TK = _expected_drops(ids_TK, weights_TK, 8, overflow)
    assert record.requested_E.tolist() == ids_TK.flatten().bincount(minlength=8).tolist()
    assert record.kept_E.tolist() == ids_TK[kept_TK].bincount(minlength=8).tolist()
    assert record.kept_E[1].item() == 8
    assert record.lost_tokens.item() == (~kept_TK.any(dim=1)).sum().item() > 0

    def masked(own: Tensor) -> Tensor:
        """Each token through its kept experts, one by one; weights are not made larger."""
        weights, _, _ = whole.router(own)
        parameters, rows = dict(whole.named_parameters()), []
        for token, kept, ids, w in zip(own, kept_TK, ids_TK.tolist(), weights, strict=True):
            chosen = [
                w[k] * one_expert(token, parameters, e, whole.config)
                for k, e in enumerate(ids)
                if kept[k]
            ]
            rows.append(sum(chosen, torch.zeros(WIDTH, dtype=own.dtype)))
        return torch.stack(rows)

    own = x.detach().clone().requires_grad_()
    expected = masked(own)
    (expected * mix).sum().backward()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(y, expected, **close)
    torch.testing.assert_close(x.grad, own.grad, **close)
    ids = layer.experts.expert_ids
    for (name, got), wanted in zip(layer.named_parameters(), whole.parameters(), strict=True):
        gradient = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        dist.all_reduce(gradient)
        if name.startswith("experts."):
            # Of the mean over ranks.
            mean = gradient[ids.start : ids.stop] / world
            torch.testing.assert_close(got.grad, mean, **close)
        else:
            summed = got.grad.clone()
            dist.all_reduce(summed)
            torch.testing.assert_close(summed, gradient, **close)


@pytest.mark.parametrize("overflow", ["position", "weight"])
def test_drops_per_source_are_the_rule_by_hand_and_gradients_those_of_the_masked_sum(
    overflow: str,
) -> None:
    run_ranks(_drops, 2, overflow)


def _rows_of_experts(rank: int, world: int) -> list[int]:
    mesh, _ = connect(world)
    case = Case(tokens=(20, 30), crowded=(1,))
    layer = spread(case.layer(), mesh, "static", capacity_factor=1.25)
    rows: list[int] = []
    layer.experts.register_forward_pre_hook(lambda _, args: rows.extend(args[1].tolist()))
    layer(case.tokens_of(rank)[0])
    return rows


def test_every_expert_computes_the_same_rows_whatever_the_load() -> None:
    # The larger first batch counts: 1.25 * 2 * 30 / 8 = 9.4, so 16 slots for each of two sources.
    assert run_ranks(_rows_of_experts, 2) == [[32] * 4, [32] * 4]


def _later_batches(rank: int, world: int) -> tuple[str, list[int]]:
    mesh, ledger = connect(world)
    layer = spread(Case().layer(), mesh, "static")
    sizes = []
    for size in (6, 4 + rank, 0, 6):
        y, _ = layer(torch.ones(size, WIDTH, dtype=torch.float64))
        sizes.append(len(y))
    # Only the first batch asks the other ranks for their size.
    assert ledger.calls == {("all_reduce", "ep"): 1, ("all_to_all", "ep"): 8}
    with pytest.raises(RuntimeError) as caught:
        layer(torch.ones(7, WIDTH, dtype=torch.float64))
    return str(caught.value), sizes


def test_later_batches_may_be_smaller_and_not_larger_than_the_first() -> None:
    for rank, (message, sizes) in enumerate(run_ranks(_later_batches, 2)):
        assert sizes == [6, 4 + rank, 0, 6]
        assert "a micro-batch of 7 tokens is larger than the 6" in message
        assert "use all_to_all" in message


def _warmed_up(rank: int, world: int) -> dict[Any, int]:
    mesh, ledger = connect(world)
    layer = spread(Case().layer(), mesh, "static")
    layer.dispatcher.warmup(9, CPU)
    for size in (3, 9):
        layer(torch.ones(size, WIDTH, dtype=torch.float64))
    return dict(ledger.calls)


def test_after_warm_up_no_rank_asks_for_sizes() -> None:
    assert run_ranks(_warmed_up, 2) == [{("all_to_all", "ep"): 4}] * 2


def _evaluation(rank: int, world: int) -> None:
    mesh, _ = connect(world)
    case = Case(tokens=(20, 30), crowded=(1,))
    layer = spread(case.layer(), mesh, "static", capacity_factor=0.1)
    x, _ = case.tokens_of(rank)
    wanted, _ = case.layer()(x)
    trained, record = layer(x)
    assert record.kept_E.sum() < record.requested_E.sum()
    assert not torch.allclose(trained, wanted)
    layer.eval()
    with torch.no_grad():
        # More tokens than in training are fine as well.
        y, record = layer(torch.cat([x, x]))
    torch.testing.assert_close(y, torch.cat([wanted, wanted]), rtol=1e-12, atol=1e-12)
    assert torch.equal(record.kept_E, record.requested_E)


def test_evaluation_drops_nothing() -> None:
    run_ranks(_evaluation, 2)


def _nan_in_dropped_tokens(rank: int, world: int) -> None:
    """Tokens whose copies come too late are NaN; their experts were chosen before."""
    mesh, _ = connect(world)
    case = Case(tokens=(20,), crowded=(1, 2), options={"expert_bias": True})
    layer = spread(case.layer(), mesh, "static", capacity_factor=1.0)
    x, mix = case.tokens_of(rank)
    weights_TK, ids_TK, _ = layer.router(x)
    weights_TK = weights_TK.detach().requires_grad_()
    late = torch.arange(20) >= 8
    x = torch.where(late[:, None], math.nan, x).requires_grad_()
    sent = layer.dispatcher.receive(layer.dispatcher.dispatch(x, ids_TK, weights_TK, 8))
    rows = layer.experts(sent.rows_RW, sent.counts_L)
    y = layer.dispatcher.combine(rows, weights_TK, sent.back)
    assert not y[late].any()
    assert y[~late].all()
    (y * mix).sum().backward()
    gradients = [x.grad, weights_TK.grad, *(p.grad for p in layer.experts.parameters())]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not x.grad[late].any()
    assert not weights_TK.grad[late].any()


def test_a_dropped_token_reaches_no_expert_even_if_it_is_nan() -> None:
    run_ranks(_nan_in_dropped_tokens, 2)


def _recomputed(rank: int, world: int) -> None:
    mesh, _ = connect(world)
    case = Case(tokens=(20, 30), crowded=(1,))
    gradients = []
    for recompute in (False, True):
        layer = spread(case.layer(), mesh, "static", capacity_factor=1.0, overflow="weight")
        x, mix = case.tokens_of(rank)
        x.requires_grad_()
        y, _ = run(layer, x, recompute=recompute)
        (y * mix).sum().backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_recomputation_drops_the_same_copies_and_gives_bit_equal_gradients() -> None:
    run_ranks(_recomputed, 2)
