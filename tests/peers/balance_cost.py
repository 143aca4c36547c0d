"""What each balance scope costs, and watching the load: `python -m tests.peers.balance_cost`.

Whole optimizer steps of the Trainer on 1 and 2 ranks (the second with experts on both). All variants have the same
weights and tokens; their first steps must give the same cross-entropy. In every round each variant is fitted once
for a few steps, in turns, and a ratio compares the medians of neighbours in time. Peak memory is not measured.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_moe import MoEModule, TokenBatch, TransformerConfig
from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.cli.process import keep_freed_memory
from lightning_moe.config import BalanceScope
from tests.kit.rank_runs import fit, parallel
from tests.kit.ranks import run_ranks
from tests.peers.rounds import (
    ENOUGH_ROUNDS,
    describe_machine,
    describe_rounds,
    median_and_range,
    quieten,
    take_turns,
)
from tests.peers.small_models import SIZES, VOCABULARY, Size

BASE: Final = "micro_batch"
UNWATCHED: Final = "micro_batch, no ExpertLoadMonitor"
SCOPES: Final = tuple(scope for scope in get_args(BalanceScope) if scope != BASE)
VARIANTS: Final = (BASE, *SCOPES, UNWATCHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How much to measure: steps of a fit, of which the first is not timed, and micro-batches of a step."""

    size: Size
    num_rounds: int
    num_steps: int
    micro_batches: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of one variant: the median milliseconds per step of every round, and the first step's cross-entropy (nats)."""

    milliseconds: list[float]
    cross_entropy: float


class Timed(MoEModule):
    """Notes when each optimizer step ends."""

    def __init__(self, config: TransformerConfig, *, watched: bool) -> None:
        super().__init__(config)
        self.watched = watched
        self.ends: list[float] = []
        self.cross_entropy: float | None = None

    def configure_callbacks(self) -> list[L.Callback]:
        own = super().configure_callbacks()
        return [c for c in own if self.watched or not isinstance(c, ExpertLoadMonitor)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.ends.append(time.perf_counter())
            if self.cross_entropy is None:
                self.cross_entropy = self.trainer.callback_metrics["train/ce"].item()


def measure(rank: int, world: int, run: Run) -> dict[str, Measured]:
    """All variants, taking turns, on every rank.

    Raises:
        RuntimeError: if two variants differ in their first cross-entropy, so that times would mean nothing.
    """
    _fit(rank, world, run, BASE)  # whatever happens once per process
    found: dict[str, float] = {}

    def milliseconds_of(variant: str) -> float:
        median, found[variant] = _fit(rank, world, run, variant)
        return median

    milliseconds = take_turns(VARIANTS, milliseconds_of, num_rounds=run.num_rounds)
    if len(set(found.values())) > 1:
        raise RuntimeError(f"the variants differ in the cross-entropy of their first step: {found}")
    return {
        variant: Measured(milliseconds=times, cross_entropy=found[variant])
        for variant, times in milliseconds.items()
    }


def _on_rank(rank: int, world: int, run: Run) -> dict[str, Measured]:
    torch.set_num_threads(run.threads)
    keep_freed_memory()
    return measure(rank, world, run)


def _fit(rank: int, world: int, run: Run, variant: str) -> tuple[float, float]:
    """Median milliseconds per step, and the first step's cross-entropy."""
    torch.manual_seed(0)
    scope = BASE if variant == UNWATCHED else variant
    config = run.size.config(lb_loss_weight=0.01, lb_loss_scope=scope, bias_gamma=1e-3)
    module = Timed(config, watched=variant != UNWATCHED)
    generator = torch.Generator().manual_seed(rank)
    shape = (run.size.rows, run.size.length + 1)
    data = []
    for _ in range(run.num_steps * run.micro_batches):
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        data.append(TokenBatch(ids_BS=ids[:, :-1].contiguous(), labels_BS=ids[:, 1:].contiguous()))
    gc.collect()
    if world > 1:
        dist.barrier()
    fit(
        rank,
        world,
        module,
        data,
        strategy=parallel(world) if world > 1 else "auto",
        accumulate_grad_batches=run.micro_batches,
        precision="32-true",
    )
    assert module.cross_entropy is not None
    steps = [b - a for a, b in zip(module.ends, module.ends[1:], strict=False)]
    return statistics.median(steps) * 1e3, module.cross_entropy


def table(measured: dict[str, Measured], run: Run, world: int) -> Table:
    """For people; a ratio above 1 says slower than `micro_batch`."""
    title = (
        f"Step time on {world} rank(s), {run.micro_batches} micro-batches of "
        f"{run.size.rows * run.size.length:,} tokens per rank and step, float32, "
        f"{describe_rounds(run.num_rounds)}"
    )
    entropy = f"first cross-entropy of all {measured[BASE].cross_entropy:.6f}"
    result = Table(title=title, caption=f"{describe_machine(run.threads)}; {entropy}")
    for name in ("balance scope", f"time / {BASE}", "range", "ms"):
        result.add_column(name)
    for variant, own in measured.items():
        ratio, lowest_and_highest = median_and_range(
            own.milliseconds, measured[BASE].milliseconds, digits=3
        )
        result.add_row(
            variant, ratio, lowest_and_highest, f"{statistics.median(own.milliseconds):.1f}"
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ENOUGH_ROUNDS)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=6, help="per fit; the first is not timed")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    options = parser.parse_args(arguments)
    run = Run(
        size=SIZES[options.size],
        num_rounds=options.rounds,
        num_steps=options.steps,
        micro_batches=options.micro_batches,
        threads=options.threads,
    )
    console = Console()
    console.width = max(console.width, 120)
    for world in options.ranks:
        measured = run_ranks(_on_rank, world, run, timeout_s=options.timeout_s)[0]
        console.print(table(measured, run, world))


if __name__ == "__main__":
    quieten()
    main()
