"""One norm for all ranks: each element of the model counts once, and every rank acts alike."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe.parallel.clip import clip_, global_norm
from tests.kit.modules import Regression
from tests.kit.rank_runs import (
    OPTIMIZERS,
    Recorded,
    batches,
    config,
    fit,
    parallel,
    whole_weights,
)
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import connect

CPU = torch.device("cpu")


def _by_hand(rank: int, world: int) -> tuple[float, list[list[float]]]:
    """A replicated gradient (3, 4), experts with three 2s on rank 0 and four 3s on rank 1."""
    mesh, ledger = connect(world)
    dense = torch.tensor([3.0, 4.0])
    expert = torch.full((3,), 2.0) if rank == 0 else torch.full((4,), 3.0)
    norm = global_norm([(dense, 1 / world), (expert, 1.0)], mesh.world, device=CPU)
    clip_([dense, expert], norm, 1.0)
    assert ledger.calls == {("all_reduce", "world"): 1}
    return norm.item(), [dense.tolist(), expert.tolist()]


def test_the_norm_is_the_root_of_73_on_every_rank() -> None:
    for rank, (norm, (dense, expert)) in enumerate(run_ranks(_by_hand, 2)):
        assert norm == pytest.approx(8.5440, abs=5e-5)
        scale = 1 / (math.sqrt(73) + 1e-6)
        assert dense == pytest.approx([3 * scale, 4 * scale])
        assert expert == pytest.approx([2 * scale] * 3 if rank == 0 else [3 * scale] * 4)


def _empty_on_one_rank(rank: int, world: int, norm_type: float) -> float:
    mesh, _ = connect(world)
    gradients = [(torch.tensor([3.0, -4.0]), 1.0)] if rank == 1 else []
    return global_norm(gradients, mesh.world, norm_type=norm_type, device=CPU).item()


@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, 7.0), (2.0, 5.0), (math.inf, 4.0)])
def test_a_rank_without_gradients_takes_part(norm_type: float, expected: float) -> None:
    assert run_ranks(_empty_on_one_rank, 2, norm_type) == [pytest.approx(expected)] * 2


def _not_finite_on_one_rank(rank: int, world: int, bad: float, norm_type: float) -> float:
    mesh, _ = connect(world)
    gradient = torch.tensor([1.0, bad if rank == 1 else 2.0])
    return global_norm([(gradient, 1.0)], mesh.world, norm_type=norm_type, device=CPU).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_no_rank_sees_a_finite_norm_where_one_has_none(bad: float, norm_type: float) -> None:
    for norm in run_ranks(_not_finite_on_one_rank, 2, bad, norm_type):
        assert not math.isfinite(norm)


class Clipped(Regression):
    """Clips by any norm through the strategy, or by torch on one process; parts can be frozen."""

    def __init__(self, norm_type: float, trainable: str, *, with_moe: bool = True) -> None:
        super().__init__(with_moe=with_moe, with_window=False)
        self.norm_type = norm_type
        self.norms: list[float] = []
        for name, parameter in self.named_parameters():
            experts = name.startswith("moe.experts.")
            parameter.requires_grad_(trainable == "all" or experts == (trainable == "experts"))

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        strategy = self.trainer.strategy
        if hasattr(strategy, "clip_grad_norm"):
            norm = strategy.clip_grad_norm(optimizer, 1e-4, self.norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), 1e-4, self.norm_type)
        self.norms.append(float(norm))


def _batches(rank: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    own = 4 // world
    data = [torch.randn(4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [batch[rank * own : (rank + 1) * own] for batch in data]


def _clipped(
    rank: int, world: int, ep: int, norm_type: float, trainable: str, with_moe: bool
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Clipped(norm_type, trainable, with_moe=with_moe).double()
    strategy = parallel(ep) if world > 1 else "auto"
    fit(rank, world, module, _batches(rank, world), strategy=strategy)
    return module.norms, whole_weights(module, strategy)


@pytest.mark.parametrize(
    ("world", "ep", "norm_type", "trainable", "with_moe"),
    [
        (2, 2, 1.0, "all", True),
        (2, 1, 2.0, "all", True),
        (2, 2, 2.0, "all", True),
        (4, 2, 2.0, "all", True),
        (2, 2, math.inf, "all", True),
        (2, 2, 2.0, "experts", True),
        (2, 2, 2.0, "dense", True),
        (2, 1, 2.0, "all", False),
    ],
)
def test_norms_and_clipped_weights_equal_torch_on_one_process(
    world: int, ep: int, norm_type: float, trainable: str, with_moe: bool
) -> None:
    ((norms, weights),) = run_ranks(_clipped, 1, 1, norm_type, trainable, with_moe, timeout_s=120)
    assert min(norms) > 1e-4
    for found_norms, found in run_ranks(
        _clipped, world, ep, norm_type, trainable, with_moe, timeout_s=120
    ):
        torch.testing.assert_close(found_norms, norms, rtol=1e-10, atol=0.0)
        for name, expected in weights.items():
            torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-8)


def _by_value(rank: int, world: int, ep: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Regression(with_moe=True, with_window=False).double()
    strategy = parallel(ep) if world > 1 else "auto"
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    fit(rank, world, module, _batches(rank, world), strategy=strategy, **clip)
    return whole_weights(module, strategy)


def test_clipping_by_value_equals_one_process() -> None:
    (weights,) = run_ranks(_by_value, 1, 1)
    for found in run_ranks(_by_value, 2, 2, timeout_s=120):
        for name, expected in weights.items():
            torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-12)


class Overflowing(Recorded):
    """In step 1, one expert of rank 1 gets an infinite gradient."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss + math.inf * self.moe_layers[1].experts.w_down[0, 0, 0]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        same = [torch.equal(a, b) for a, b in zip(self.before, self.parameters(), strict=True)]
        assert all(same) if batch_idx == 1 else not all(same)


def _overflow(rank: int, world: int, ep: int, distributed: bool) -> list[float]:
    torch.manual_seed(0)
    module = Overflowing(config(), OPTIMIZERS["adamw"])
    module.double()
    strategy = parallel(ep, distributed_optimizer=distributed)
    trainer = fit(
        rank,
        world,
        module,
        batches(rank, world, steps=3, sequences=4),
        strategy=strategy,
        gradient_clip_val=0.05,
    )
    weights = whole_weights(module, strategy)
    assert all(weight.isfinite().all() for weight in weights.values())
    return [*module.norms, trainer.callback_metrics["train/skipped_steps"].item()]


@pytest.mark.parametrize(("ep", "distributed"), [(2, True), (2, False), (1, True)])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ep: int, distributed: bool) -> None:
    first, second = run_ranks(_overflow, 2, ep, distributed, timeout_s=120)
    assert str(first) == str(second)
    assert [math.isfinite(norm) for norm in first[:3]] == [True, False, True]
    assert first[3] == 1.0
