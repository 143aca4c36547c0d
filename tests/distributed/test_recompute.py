"""Recomputed layers that share experts between ranks: everything equal, collectives in one order on all ranks."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from lightning_moe.config import (
    AttentionConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoETransformer, Routing, balance_loss, z_loss
from tests.kit.randomized import randomized
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import connect, spread

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "block": {"recompute": "block"},
    "moe": {"recompute": "moe"},
    "attention": {"recompute": "attention"},
    "second layer only": {"layer_overrides": {1: LayerConfig(recompute="moe")}},
    "block, offloaded": {"recompute": "block", "offload_activations": True},
}
# Dispatch and combine of every layer that recomputes its experts, once more in backward.
REPEATED = {"block": 2, "moe": 2, "second layer only": 1, "block, offloaded": 2}


def _model(ways: dict[str, Any], *, tied: bool) -> MoETransformer:
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=2,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(
            num_experts=6,
            hidden_size=5,
            router=RouterConfig(top_k=2, z_loss_weight=0.1, jitter_eps=0.1),
        ),
        **ways,
    )
    model = randomized(MoETransformer(config), torch.Generator().manual_seed(1)).double()
    for block in model.blocks:
        if tied:
            nn.init.zeros_(block.feed_forward.router.weight)
    return model


def _ways(rank: int, world: int, dispatcher: str, tied: bool) -> dict[str, list[tuple[str, str]]]:
    """Collectives of every way, in order, after a check that all ways give the same."""
    mesh, ledger = connect(world)
    # Nine of ten tokens are alike, as padding would be, and the ranks have different numbers of them.
    ids = torch.zeros(2 + rank, 10, dtype=torch.int64)
    ids[:, 3] = torch.arange(2 + rank) + 4 * rank
    results, orders = {}, {}
    for name, way in WAYS.items():
        model = spread(_model(way, tied=tied), mesh, dispatcher)
        ledger.order.clear()
        results[name] = _step(model, ids)
        orders[name] = [call for call in ledger.order if call[0] == "all_to_all"]
        if tied:
            assert all(
                r.requested_E.tolist() == [ids.numel()] * 2 + [0] * 4 for r in results[name][1]
            )
    for name, found in results.items():
        for ours, expected in zip(_tensors(found), _tensors(results["none"]), strict=True):
            assert torch.equal(ours, expected), name
    return orders


def _step(model: MoETransformer, ids: torch.Tensor) -> tuple[Any, list[Routing], Any]:
    torch.manual_seed(3)
    logits, records = model(ids)
    loss = logits.logsumexp(dim=-1).sum() + balance_loss(records) + z_loss(records)
    loss.backward()
    return loss.detach(), records, [parameter.grad for parameter in model.parameters()]


def _tensors(step: tuple[Any, list[Routing], Any]) -> list[torch.Tensor]:
    loss, records, gradients = step
    values = [getattr(record, field.name) for record in records for field in fields(Routing)]
    return [loss, *(value for value in values if value is not None), *gradients]


@pytest.mark.parametrize("tied", [False, True], ids=["learned", "all tied"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "static"])
def test_two_ranks_recompute_exactly_what_they_computed_in_the_same_order(
    dispatcher: str, tied: bool
) -> None:
    first, second = run_ranks(_ways, 2, dispatcher, tied)
    assert first == second
    # Two layers, there and back, forward and backward.
    assert {name: len(order) for name, order in first.items()} == {
        name: 8 + 2 * REPEATED.get(name, 0) for name in WAYS
    }
