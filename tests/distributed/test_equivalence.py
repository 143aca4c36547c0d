"""Any number of ranks trains as one process does with the whole batch: losses, norms and weights of 20 steps."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.callbacks import RouterBiasCorrection
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

STEPS = 20
CLIP = 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one test varies.

    Attributes:
        crowded: draw every token of every layer to experts 0 and 1.
    """

    optimizer: str = "adamw"
    scope: str = "global_micro_batch"
    accumulate: int = 1
    recompute: str = "none"
    precision: str = "64-true"
    crowded: bool = False
    strategy: tuple[tuple[str, Any], ...] = field(default=())


def _train(rank: int, world: int, run: Run, ep: int) -> tuple[list[float], list[float], Any]:
    torch.manual_seed(0)
    model = config(lb_loss_scope=run.scope, recompute=run.recompute)
    module = Recorded(model, OPTIMIZERS[run.optimizer])
    if run.precision == "64-true":
        module.double()
    if run.crowded:
        for layer in module.moe_layers:
            layer.router.score_bias[:2] += 100.0
    strategy = parallel(ep, **dict(run.strategy)) if world > 1 else "auto"
    fit(
        rank,
        world,
        module,
        batches(rank, world, steps=STEPS, accumulate=run.accumulate),
        strategy=strategy,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=CLIP,
        precision=run.precision,
    )
    return module.losses, module.norms, whole_weights(module, strategy)


@cache
def _one_process(run: Run) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """A plain Trainer on a single device, with the whole batch at once."""
    return run_ranks(_train, 1, run, 1, timeout_s=180)[0]


def _assert_equal_to_one_process(
    world: int, ep: int, run: Run, *, loss: float, weight: float
) -> None:
    reference = Run(
        optimizer=run.optimizer, scope=run.scope, precision=run.precision, crowded=run.crowded
    )
    losses, norms, weights = _one_process(reference)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert max(norms) > CLIP  # clipping takes part
    for found_losses, found_norms, found in run_ranks(_train, world, run, ep, timeout_s=300):
        torch.testing.assert_close(found_losses, losses, rtol=0.0, atol=loss)
        torch.testing.assert_close(found_norms, norms, rtol=0.0, atol=10 * loss)
        for name, expected in weights.items():
            torch.testing.assert_close(
                found[name], expected, rtol=0.0, atol=weight, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("world", "ep", "optimizer"),
    [
        (2, 1, "sgd"),
        (2, 1, "adamw"),
        (2, 2, "sgd"),
        (2, 2, "adamw"),
        (4, 1, "adamw"),
        (4, 2, "sgd"),
        (4, 2, "adamw"),
        (4, 4, "sgd"),
    ],
)
def test_ranks_train_as_one_process_does(world: int, ep: int, optimizer: str) -> None:
    run = Run(optimizer=optimizer)
    _assert_equal_to_one_process(world, ep, run, loss=1e-9, weight=1e-8)


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_two_micro_batches_on_ranks_train_as_one_process_with_one(world: int, ep: int) -> None:
    run = Run(scope="sequence", accumulate=2)
    _assert_equal_to_one_process(world, ep, run, loss=1e-9, weight=1e-8)


@pytest.mark.parametrize(("ep", "optimizer"), [(1, "adamw"), (2, "sgd")])
def test_a_replicated_optimizer_trains_alike(ep: int, optimizer: str) -> None:
    run = Run(optimizer=optimizer, strategy=(("distributed_optimizer", False),))
    _assert_equal_to_one_process(2, ep, run, loss=1e-9, weight=1e-8)


@pytest.mark.parametrize(
    ("recompute", "strategy"),
    [("block", ()), ("moe", (("dispatcher", "static"), ("capacity_factor", 2.0)))],
    ids=["blocks", "experts with static dispatch"],
)
def test_recomputed_parts_train_alike(
    recompute: str, strategy: tuple[tuple[str, Any], ...]
) -> None:
    run = Run(recompute=recompute, scope="sequence", accumulate=2, strategy=strategy)
    _assert_equal_to_one_process(2, 2, run, loss=1e-9, weight=1e-8)


def test_static_dispatch_with_room_for_everything_trains_alike() -> None:
    run = Run(strategy=(("dispatcher", "static"), ("capacity_factor", 2.0)))
    _assert_equal_to_one_process(2, 2, run, loss=1e-9, weight=1e-8)


def test_tiny_buckets_train_alike() -> None:
    run = Run(strategy=(("bucket_mb", 0.01),))
    _assert_equal_to_one_process(2, 2, run, loss=1e-9, weight=1e-8)


def test_all_tokens_on_the_experts_of_one_rank_train_alike() -> None:
    _assert_equal_to_one_process(2, 2, Run(crowded=True), loss=1e-9, weight=1e-8)


@pytest.mark.parametrize("ep", [1, 2])
def test_float32_trains_alike_within_its_precision(ep: int) -> None:
    # Plain gradient descent: Adam would turn rounding noise of tiny gradients into steps of full size.
    run = Run(optimizer="sgd", precision="32-true")
    _assert_equal_to_one_process(2, ep, run, loss=1e-5, weight=1e-5)


def _train_own(
    rank: int, world: int, ep: int, with_moe: bool, with_window: bool
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Regression(with_moe=with_moe, with_window=with_window).double()
    generator = torch.Generator().manual_seed(4)
    data = [torch.randn(8, 5, 6, generator=generator, dtype=torch.float64) for _ in range(10)]
    own = 8 // world
    strategy = parallel(ep) if world > 1 else "auto"
    fit(
        rank,
        world,
        module,
        [batch[rank * own : (rank + 1) * own] for batch in data],
        strategy=strategy,
        gradient_clip_val=CLIP,
        callbacks=[RouterBiasCorrection()] if with_window else None,
    )
    return module.losses, whole_weights(module, strategy)


@pytest.mark.parametrize(
    ("world", "ep", "with_moe", "with_window"),
    [
        (2, 1, True, True),
        (2, 2, True, True),
        (2, 2, True, False),
        (2, 1, False, False),
    ],
)
def test_a_users_own_module_with_mean_losses_trains_as_on_one_process(
    world: int, ep: int, with_moe: bool, with_window: bool
) -> None:
    (losses, weights), *_ = run_ranks(_train_own, 1, 1, with_moe, with_window, timeout_s=120)
    for found_losses, found in run_ranks(
        _train_own, world, ep, with_moe, with_window, timeout_s=180
    ):
        torch.testing.assert_close(found_losses, losses, rtol=0.0, atol=1e-9)
        assert found.keys() == weights.keys()
        for name, expected in weights.items():
            torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-8)
