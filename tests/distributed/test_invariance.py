"""What each balance scope is invariant to: the same rows of a step, however they are split and wherever they run."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_moe import (
    AttentionConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
)
from lightning_moe.config import BALANCE_INVARIANCE
from tests.kit.rank_runs import Recorded, batches, fit, parallel, whole_weights
from tests.kit.ranks import run_ranks

STEPS = 3
SEQUENCES = 16  # per step, over all ranks and micro-batches
# Scopes of the layers of one model, by what they promise.
EVERYTHING = ("sequence", "lagged", "exact")
RANKS = ("global_micro_batch", "accumulated")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to compute a step.

    Attributes:
        stream: read a loader without length.
        jitter: noise on the router's input.
    """

    accumulate: int = 1
    ep: int = 1
    recompute: str = "none"
    stream: bool = False
    jitter: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out: per step loss, gradient norm and all logged means; in the end weights and biases."""

    logged: list[dict[str, float]]
    weights: dict[str, Tensor]


class Stream(IterableDataset[TokenBatch]):
    """Batches whose number nobody knows before their end."""

    def __init__(self, data: list[TokenBatch]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self.data)


class Logged(Recorded):
    """All that is logged, of every optimizer step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        # As if a step had gone by: the very first one has no step before it.
        self.window.load_state_dict({"previous": [[30, 50, 10, 70]] * len(self.moe_layers)})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            found = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
            found.pop("train/tokens_per_second")
            self.logged = [*getattr(self, "logged", []), found]


def _config(scopes: tuple[str, ...], split: Split) -> TransformerConfig:
    moes = [
        MoEConfig(
            num_experts=4,
            hidden_size=8,
            router=RouterConfig(
                top_k=2,
                lb_loss_weight=2.0,
                lb_loss_scope=scope,
                z_loss_weight=0.1,
                bias_gamma=0.01,
                jitter_eps=split.jitter,
            ),
        )
        for scope in scopes
    ]
    return TransformerConfig(
        vocab_size=256,
        d_model=16,
        num_layers=len(moes),
        attention=AttentionConfig(num_heads=2),
        layer_overrides={i: LayerConfig(moe=moe) for i, moe in enumerate(moes)},
        init_std=0.4,
        recompute=split.recompute,
    )


def _train(rank: int, world: int, scopes: tuple[str, ...], splits: list[Split]) -> list[Result]:
    return [_train_split(rank, world, scopes, split) for split in splits]


def _train_split(rank: int, world: int, scopes: tuple[str, ...], split: Split) -> Result:
    torch.manual_seed(0)
    module = Logged(_config(scopes, split), lambda p: torch.optim.SGD(p, lr=0.1)).double()
    strategy = parallel(split.ep) if world > 1 else "auto"
    data = batches(rank, world, steps=STEPS, accumulate=split.accumulate, sequences=SEQUENCES)
    data = Stream(data) if split.stream else data
    fit(rank, world, module, data, strategy=strategy, accumulate_grad_batches=split.accumulate)
    assert len(module.logged) == STEPS
    return Result(logged=module.logged, weights=whole_weights(module, strategy))


@cache
def _one_process(scopes: tuple[str, ...], accumulate: int) -> Result:
    """A plain Trainer on a single device."""
    found: list[Result] = run_ranks(
        _train, 1, scopes, [Split(accumulate=accumulate)], timeout_s=180
    )[0]
    return found[0]


def _largest_difference(found: Result, expected: Result) -> float:
    weights = [(found.weights[n] - w).abs().max().item() for n, w in expected.weights.items()]
    logged = [
        abs(step[name] - value)
        for step, wanted in zip(found.logged, expected.logged, strict=True)
        for name, value in wanted.items()
    ]
    return max(*weights, *logged)


@pytest.mark.parametrize(
    ("world", "splits"),
    [
        (1, [Split(accumulate=2), Split(accumulate=4, recompute="block", stream=True)]),
        (2, [Split(ep=2), Split(accumulate=2), Split(accumulate=4, ep=2, recompute="block")]),
        (4, [Split(ep=2, recompute="block"), Split(accumulate=4, ep=2, stream=True)]),
    ],
)
def test_sequence_lagged_and_exact_do_not_depend_on_accumulation_ranks_or_recomputation(
    world: int, splits: list[Split]
) -> None:
    expected = _one_process(EVERYTHING, 1)
    for results in run_ranks(_train, world, EVERYTHING, splits, timeout_s=300):
        for split, found in zip(splits, results, strict=True):
            assert _largest_difference(found, expected) < 1e-10, split


@pytest.mark.parametrize(
    ("world", "splits"),
    [
        (2, [Split(accumulate=2), Split(accumulate=2, ep=2, recompute="block")]),
        (4, [Split(accumulate=2, ep=2)]),
    ],
)
def test_global_micro_batch_and_accumulated_do_not_depend_on_ranks_or_recomputation(
    world: int, splits: list[Split]
) -> None:
    expected = _one_process(RANKS, 2)
    for results in run_ranks(_train, world, RANKS, splits, timeout_s=300):
        for split, found in zip(splits, results, strict=True):
            assert _largest_difference(found, expected) < 1e-10, split


def test_the_documented_promises_are_those_proved_here() -> None:
    assert {scope for scope, kept in BALANCE_INVARIANCE.items() if len(kept) == 2} == {*EVERYTHING}
    assert {scope for scope, kept in BALANCE_INVARIANCE.items() if kept == ("ranks",)} == {*RANKS}
    assert BALANCE_INVARIANCE["micro_batch"] == ()


def test_micro_batch_depends_on_neither_expert_ranks_nor_recomputation() -> None:
    splits = [Split(), Split(ep=2, recompute="block")]
    for plain, other in run_ranks(_train, 2, ("micro_batch",), splits, timeout_s=300):
        assert _largest_difference(other, plain) < 1e-10


@pytest.mark.parametrize("scope", ["micro_batch", "global_micro_batch", "accumulated"])
def test_the_other_scopes_do_depend_on_accumulation(scope: str) -> None:
    difference = _largest_difference(_one_process((scope,), 2), _one_process((scope,), 1))
    assert difference > 1e-4


def test_micro_batch_does_depend_on_ranks() -> None:
    found = run_ranks(_train, 2, ("micro_batch",), [Split()], timeout_s=180)[0][0]
    assert _largest_difference(found, _one_process(("micro_batch",), 1)) > 1e-4
    together = _one_process(("global_micro_batch",), 1)
    assert _largest_difference(_one_process(("micro_batch",), 1), together) < 1e-10


def test_noise_on_ranks_is_the_same_ahead_and_in_training_and_with_recomputation() -> None:
    """Each fit would stop where it routes otherwise than it has foreseen."""
    splits = [Split(accumulate=2, ep=2, jitter=0.4, recompute=how) for how in ("none", "block")]
    for kept, recomputed in run_ranks(_train, 2, ("exact", "exact"), splits, timeout_s=300):
        assert _largest_difference(recomputed, kept) < 1e-10


def test_without_accumulation_accumulated_and_exact_are_the_same() -> None:
    accumulated, exact = _one_process(("accumulated",), 1), _one_process(("exact",), 1)
    assert _largest_difference(accumulated, exact) == 0.0
