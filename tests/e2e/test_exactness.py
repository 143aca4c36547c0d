"""Accumulation, ranks, padding and recomputation change nothing that is trained or logged."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_moe import TokenBatch
from tests.kit import reference, reference_model
from tests.kit.by_hand import train_by_hand
from tests.kit.ranks import run_ranks
from tests.kit.runs import (
    GAMMA,
    LEARNING_RATE,
    SgdModule,
    assert_same,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)

Closure = Callable[[], object]

LOSSES = {
    "lb_loss_scope": "sequence",
    "lb_loss_weight": 0.5,
    "z_loss_weight": 0.1,
    "orth_loss_weight": 0.7,
    "bias_gamma": GAMMA,
}
# Three steps of eight rows, two of them in a micro-batch: ragged, with one micro-batch of padding only.
RAGGED = [
    (8, 3),
    (1, 5),
    (0, 0),
    (7, 0),
    (2, 2),
    (8, 8),
    (4, 6),
    (1, 1),
    (5, 8),
    (3, 0),
    (6, 2),
    (8, 1),
]


def _windows(batches: list[TokenBatch], size: int) -> list[list[TokenBatch]]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def _joined(batches: list[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        ids_BS=torch.cat([batch.ids_BS for batch in batches]),
        labels_BS=torch.cat([batch.labels_BS for batch in batches]),
    )


@pytest.mark.parametrize("num_micro_batches", [12, 10], ids=["full", "partial last window"])
def test_accumulation_over_ragged_rows_trains_like_the_formulas_on_whole_batches(
    tmp_path: Path, num_micro_batches: int
) -> None:
    batches = make_batches(RAGGED[:num_micro_batches])
    module = make_module(tiny_config(**LOSSES))
    expected = train_by_hand(module, _windows(batches, 4))
    assert_same(run(tmp_path, module, batches, accumulate_grad_batches=4), expected)


def test_one_batch_per_step_trains_like_the_formulas(tmp_path: Path) -> None:
    batches = [_joined(window) for window in _windows(make_batches(RAGGED), 4)]
    module = make_module(tiny_config(**LOSSES))
    expected = train_by_hand(module, [[batch] for batch in batches])
    assert_same(run(tmp_path, module, batches), expected)


# Lightning says so of every module with an `optimizer_step`; ours works once per optimizer step.
@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches != 1")
def test_a_change_of_accumulation_between_epochs_trains_like_the_formulas(tmp_path: Path) -> None:
    batches = make_batches(RAGGED[:8])
    module = make_module(tiny_config(**LOSSES))
    expected = train_by_hand(module, [*_windows(batches, 4), *_windows(batches, 2)])
    scheduler = GradientAccumulationScheduler(scheduling={0: 4, 1: 2})
    assert_same(run(tmp_path, module, batches, callbacks=[scheduler], max_epochs=2), expected)


@pytest.mark.parametrize("scope", ["micro_batch", "accumulated", "lagged", "exact"])
def test_each_balance_scope_trains_like_its_formula(tmp_path: Path, scope: str) -> None:
    batches = make_batches(RAGGED[:6])  # the second step of each epoch is shorter
    module = make_module(tiny_config(**(LOSSES | {"lb_loss_scope": scope})))
    expected = train_by_hand(module, _windows(batches, 4) * 2, scope=scope)
    got = run(tmp_path, module, batches, accumulate_grad_batches=4, max_epochs=2)
    assert_same(got, expected)


def test_a_step_of_padding_only_changes_no_weight_and_logs_zero_losses(tmp_path: Path) -> None:
    losses = LOSSES | {"orth_loss_weight": None}
    module = make_module(tiny_config(**losses))
    before = {name: w.double() for name, w in module.model.named_parameters()}
    got = run(tmp_path, module, make_batches([(0, 0), (0, 0)]), accumulate_grad_batches=2)
    torch.testing.assert_close({name: got.weights[name] for name in before}, before, rtol=0, atol=0)
    assert got.steps[0]["train/loss"] == got.steps[0]["train/balance_loss"] == 0.0
    assert not any(b.any() for name, b in got.weights.items() if name.endswith("score_bias"))


def test_recomputing_blocks_or_parts_of_them_changes_not_one_bit(tmp_path: Path) -> None:
    kept, *recomputed = (
        run(
            tmp_path,
            make_module(tiny_config(recompute=recompute, jitter_eps=0.1, **LOSSES)),
            make_batches(RAGGED),
            accumulate_grad_batches=4,
        )
        for recompute in ("none", "block", "moe", "attention")
    )
    for found in recomputed:
        assert_same(found, kept, tolerance=0.0)
    assert len(kept.steps) == 3


# Name, micro-batches over both ranks, accumulation, balance scope.
RANK_RUNS = [
    ("whole", 12, 1, "sequence"),
    ("accumulated", 12, 2, "sequence"),
    ("counted ahead", 10, 2, "exact"),
    ("partial", 10, 2, "sequence"),
]


def _train_on_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    # Tells Lightning that its ranks run already.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    options = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    results: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, num_batches, accumulate, scope in RANK_RUNS:
            mine = make_batches(RAGGED[:num_batches])[rank::world]
            module = make_module(tiny_config(**(LOSSES | {"lb_loss_scope": scope})))
            options["accumulate_grad_batches"] = accumulate
            results[name] = run(folder, module, mine, **options)
        trainer = make_trainer(folder, precision="64-true", **options)
        mine = make_batches(VAL_LENGTHS)[rank::world]
        results["validated"] = trainer.validate(module, make_loader(mine), verbose=False)[0]
    results["warnings"] = [str(warning.message) for warning in caught]
    return results


VAL_LENGTHS = [(8, 7), (1, 0), (2, 8), (0, 3)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of two ranks for all tests below; most of a rank's time goes into imports."""
    return run_ranks(_train_on_rank, 2, tmp_path_factory.mktemp("ranks"), timeout_s=180)


@pytest.mark.parametrize(("name", "num_batches", "accumulate", "scope"), RANK_RUNS)
def test_two_ranks_train_like_the_formulas_on_the_rows_of_both(
    two_ranks: list[dict[str, Any]], name: str, num_batches: int, accumulate: int, scope: str
) -> None:
    windows = _windows(make_batches(RAGGED[:num_batches]), 2 * accumulate)
    expected = train_by_hand(make_module(tiny_config(**LOSSES)), windows, scope=scope)
    for results in two_ranks:
        assert_same(results[name], expected)


def test_two_ranks_end_with_exactly_equal_weights_and_biases(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (results["partial"].weights for results in two_ranks)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    biases = [value for name, value in first.items() if name.endswith("score_bias")]
    assert all(bias.any() and bias.dtype == torch.float32 for bias in biases)


def test_validation_on_two_ranks_is_the_mean_over_the_tokens_of_both(
    two_ranks: list[dict[str, Any]],
) -> None:
    weights = two_ranks[0]["partial"].weights
    batch = _joined(make_batches(VAL_LENGTHS))
    logits, _ = reference_model.transformer(batch.ids_BS, weights, tiny_config(**LOSSES))
    nats = reference.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
    for results in two_ranks:
        assert results["validated"]["val/ce"] == pytest.approx(nats.item() / 29, rel=1e-12)


def test_training_on_ranks_warns_of_nothing(two_ranks: list[dict[str, Any]]) -> None:
    assert [m for m in two_ranks[0]["warnings"] if "workers" not in m and "LeafSpec" not in m] == []


class _StepsThroughLightning(SgdModule):
    """The usual override for a warm-up of one's own, without super()."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: LightningOptimizer, closure: Closure
    ) -> None:
        optimizer.step(closure=closure)


@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches != 1")
def test_an_optimizer_step_without_super_still_trains_like_the_formulas(tmp_path: Path) -> None:
    batches = make_batches(RAGGED)
    module = make_module(tiny_config(**LOSSES), _StepsThroughLightning)
    expected = train_by_hand(module, _windows(batches, 4))
    got = run(tmp_path, module, batches, accumulate_grad_batches=4, gradient_clip_val=1e9)
    assert_same(got, expected)


class _Norms(L.Callback):
    """Gradient norms as the Trainer's own callbacks see them, before the module's callbacks."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.seen.append(torch.nn.utils.get_total_norm(gradients).item())


def test_callbacks_of_the_trainer_see_divided_gradients(tmp_path: Path) -> None:
    norms = _Norms()
    module = make_module(tiny_config(**LOSSES))
    options = {"callbacks": [norms], "accumulate_grad_batches": 4}
    got = run(tmp_path, module, make_batches(RAGGED), **options)
    assert norms.seen == [step["train/grad_norm"] for step in got.steps]
    assert len(norms.seen) == 3


class _StepsPastLightning(SgdModule):
    """Skips every hook that could divide the gradients."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: LightningOptimizer, closure: Closure
    ) -> None:
        closure()
        optimizer.optimizer.step()


@pytest.mark.parametrize("num_batches", [1, 2])
def test_a_step_that_leaves_gradients_undivided_is_refused(
    tmp_path: Path, num_batches: int
) -> None:
    module = make_module(tiny_config(**LOSSES), _StepsPastLightning)
    with pytest.raises(
        RuntimeError, match=r"nothing has closed the module's StepWindow.*pass the closure"
    ):
        run(tmp_path, module, make_batches(RAGGED[:num_batches]))


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_the_loss_is_linear_in_the_balance_weight_and_its_slope_is_the_balance(
    tmp_path: Path, scope: str
) -> None:
    batches = make_batches(RAGGED[:1])

    def first_step(weight: float) -> dict[str, float]:
        config = tiny_config(lb_loss_weight=weight, lb_loss_scope=scope)
        return run(tmp_path, make_module(config), batches).steps[0]

    steps = [first_step(weight) for weight in (0.0, 0.01, 0.02)]
    loss = [step["train/loss"] for step in steps]
    assert loss[0] == pytest.approx(steps[0]["train/ce"], rel=1e-12)
    # The logged value is the mean over two layers; the loss has their sum.
    slope = 2 * steps[0]["train/balance_loss"]
    assert loss[1] - loss[0] == pytest.approx(0.01 * slope, rel=1e-9)
    assert loss[2] - loss[1] == pytest.approx(0.01 * slope, rel=1e-9)


def test_without_a_language_model_loss_routers_follow_the_balance_alone(tmp_path: Path) -> None:
    batch = make_batches([(8, 3, 5)])[0]
    config = tiny_config(lb_loss_weight=1.0, lb_loss_scope="sequence")
    module = make_module(config)
    with torch.no_grad():
        # No gradient of the cross-entropy passes a head of zeros.
        module.model.head.weight.zero_()
    weights = {name: w.detach().double() for name, w in module.model.state_dict().items()}
    names = [f"blocks.{layer}.feed_forward.router.weight" for layer in range(2)]
    leaves = [weights[name].requires_grad_() for name in names]
    _, routed = reference_model.transformer(batch.ids_BS, weights, config)
    loss = torch.zeros((), dtype=torch.float64)
    for decisions, length in zip(routed, (8, 3, 5), strict=True):
        for decision in decisions:
            ids, shares = decision.ids[:length], decision.shares[:length]
            loss = loss + length / 16 * reference.balance_loss(ids, shares)
    gradients = torch.autograd.grad(loss, leaves)
    got = run(tmp_path, module, [batch]).weights
    for name, leaf, gradient in zip(names, leaves, gradients, strict=True):
        assert gradient.norm() > 1e-3
        expected = leaf.detach() - LEARNING_RATE * gradient
        torch.testing.assert_close(got[name], expected, rtol=1e-12, atol=1e-12)
