"""What users can check of their own module: promises kept, promises broken, and what was never promised."""

import copy
import doctest
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_moe import (
    MoEConfig,
    MoEModule,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
    assert_balance_invariant,
)
from lightning_moe.nn import MoE, Routing
from lightning_moe.step import invariance_check


class Own(L.LightningModule):
    """A layer per scope."""

    def __init__(self, *scopes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"top_k": 2, "jitter_eps": 0.4, "lb_loss_weight": 1.0}
        routers = [RouterConfig(lb_loss_scope=scope, **options) for scope in scopes]
        self.layers = nn.ModuleList(
            MoE(5, MoEConfig(num_experts=3, hidden_size=4, router=router), init_std=0.8)
            for router in routers
        )

    def routing_step(self, batch: Tensor, batch_idx: int) -> list[Routing]:
        records = []
        for layer in self.layers:
            y, routing = layer(batch)
            batch = batch + y
            records.append(routing)
        return records


def _batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 7, 5, generator=torch.Generator().manual_seed(1))


def test_promises_of_each_layer_are_checked_and_the_others_told_apart() -> None:
    module = Own("sequence", "lagged", "exact", "accumulated", "micro_batch")
    before = copy.deepcopy(module.state_dict())
    lines = assert_balance_invariant(module, _batch()).splitlines()
    for line, scope in zip(lines[:3], ("sequence", "lagged", "exact"), strict=True):
        assert f"{scope} doesn't depend on accumulation and ranks; the same in 2 and 4" in line
    assert lines[3].startswith("layers.3: accumulated does depend on accumulation (not on: ranks)")
    assert "micro_batch does depend on accumulation (not on: only expert_parallel" in lines[4]
    for line in lines[3:]:
        assert float(line.split("differ by ")[1].split()[0]) > 1e-3
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert module.training


class _MeanOfBatch(Own):
    """Centres a batch by its own mean, so that sequences are not treated by themselves."""

    def routing_step(self, batch: Tensor, batch_idx: int) -> list[Routing]:
        return super().routing_step(batch - batch.mean(dim=(0, 1)), batch_idx)


class _ScaledScores(Own):
    """Equal counts and losses; gradients that depend on the number of sequences."""

    def routing_step(self, batch: Tensor, batch_idx: int) -> list[Routing]:
        records = super().routing_step(batch, batch_idx)
        scale = 1 + 1e-6 * len(batch)
        return [
            replace(
                r,
                score_sums_E=r.score_sums_E.detach()
                + scale * (r.score_sums_E - r.score_sums_E.detach()),
            )
            for r in records
        ]


@pytest.mark.parametrize("kind", [_MeanOfBatch, _ScaledScores])
@pytest.mark.parametrize("scope", ["lagged", "exact"])
def test_a_broken_promise_names_layer_scope_and_difference(kind: type[Own], scope: str) -> None:
    found = "tokens go to other experts" if kind is _MeanOfBatch else "loss or gradients differ by "
    message = rf"layers\.0: model\.moe\.router\.lb_loss_scope='{scope}' promises .* {found}"
    with pytest.raises(AssertionError, match=message):
        assert_balance_invariant(kind(scope), _batch())


def test_padding_and_nested_batches_are_split_along() -> None:
    router = RouterConfig(top_k=2, lb_loss_weight=1.0, lb_loss_scope="exact")
    moe = MoEConfig(num_experts=4, hidden_size=8, router=router)
    module = MoEModule(TransformerConfig(vocab_size=11, d_model=8, num_layers=2, moe=moe))
    ids = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(7) < torch.tensor([[7], [2], [0]]), ids, -100)
    report = assert_balance_invariant(module, TokenBatch(ids_BS=ids, labels_BS=labels))
    assert len(report.splitlines()) == 2


@pytest.mark.parametrize(
    ("module", "batch", "message"),
    [
        (Own(), _batch(), "needs Own to have an MoE layer"),
        (L.LightningModule(), _batch(), "needs LightningModule to have an MoE layer"),
        (Own("exact"), _batch(1), r"\[1\] rows; give a batch .* at least 2"),
        (Own("exact"), [_batch(2), _batch(3)], r"have \[2, 3\] rows"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    module: L.LightningModule, batch: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assert_balance_invariant(module, batch)


def test_a_module_without_routing_step_is_refused() -> None:
    module = L.LightningModule()
    module.layer = Own("exact").layers[0]
    with pytest.raises(ValueError, match=r"to have a method routing_step\(batch, batch_idx\)"):
        assert_balance_invariant(module, _batch())


def test_the_example_in_its_documentation_runs() -> None:
    result = doctest.testmod(invariance_check)
    assert result.attempted > 5
    assert result.failed == 0
