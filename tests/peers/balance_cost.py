"""What each balance scope costs, and watching the load: `python -m tests.peers.balance_cost`.

Whole optimizer steps of the Trainer on 1 and 2 ranks (the second with experts on both). All variants have the same
weights and tokens; their first steps must give the same cross-entropy. In every round each variant is fitted once
for a few steps, in turns, and a ratio compares the medians of neighbours in time. Peak memory is not measured.
"""

import argparse
import gc
import os
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

from lightning_moe import (
    AttentionConfig,
    MoEConfig,
    MoEModule,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
)
from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.cli.memory import keep_freed_memory
from lightning_moe.config import BalanceScope
from tests.distributed.trainer_runs import fit, parallel
from tests.ranks import run_ranks

BASE: Final = "micro_batch"
UNWATCHED: Final = "micro_batch, no ExpertLoadMonitor"
SCOPES: Final = tuple(scope for scope in get_args(BalanceScope) if scope != BASE)
VARIANTS: Final = (BASE, *SCOPES, UNWATCHED)
ENOUGH_ROUNDS: Final = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, and the rows of a micro-batch on one rank."""

    d_model: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_layers: int
    rows: int
    length: int


SIZES: Final = {
    "full": Size(
        d_model=256, hidden_size=256, num_experts=32, top_k=4, num_layers=4, rows=4, length=256
    ),
    "small": Size(
        d_model=32, hidden_size=16, num_experts=8, top_k=2, num_layers=2, rows=2, length=16
    ),
}


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

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
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
    milliseconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    found: dict[str, float] = {}
    order = list(VARIANTS)
    for _ in range(run.num_rounds):
        for variant in order:
            median, found[variant] = _fit(rank, world, run, variant)
            milliseconds[variant].append(median)
        order.reverse()
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
    scope: Any = BASE if variant == UNWATCHED else variant
    module = Timed(_config(run.size, scope), watched=variant != UNWATCHED)
    generator = torch.Generator().manual_seed(rank)
    shape = (run.size.rows, run.size.length + 1)
    data = []
    for _ in range(run.num_steps * run.micro_batches):
        ids = torch.randint(256, shape, generator=generator)
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


def _config(size: Size, scope: BalanceScope) -> TransformerConfig:
    router = RouterConfig(
        top_k=size.top_k, lb_loss_weight=0.01, lb_loss_scope=scope, bias_gamma=1e-3
    )
    return TransformerConfig(
        vocab_size=256,
        d_model=size.d_model,
        num_layers=size.num_layers,
        attention=AttentionConfig(num_heads=4),
        moe=MoEConfig(num_experts=size.num_experts, hidden_size=size.hidden_size, router=router),
    )


def table(measured: dict[str, Measured], run: Run, world: int) -> Table:
    """For people; a ratio above 1 says slower than `micro_batch`."""
    title = (
        f"Step time on {world} rank(s), {run.micro_batches} micro-batches of "
        f"{run.size.rows * run.size.length:,} tokens per rank and step, float32, {run.num_rounds} interleaved rounds"
    )
    if run.num_rounds < ENOUGH_ROUNDS:
        title += " (too few to quote)"
    result = Table(
        title=title,
        caption=f"torch {torch.__version__}, {run.threads} thread(s) per rank, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; first cross-entropy of all {measured[BASE].cross_entropy:.6f}",
    )
    for name in ("balance scope", f"time / {BASE}", "range", "ms"):
        result.add_column(name)
    for variant, own in measured.items():
        pairs = zip(own.milliseconds, measured[BASE].milliseconds, strict=True)
        ratios = [mine / base for mine, base in pairs]
        result.add_row(
            variant,
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} - {max(ratios):.3f}",
            f"{statistics.median(own.milliseconds):.1f}",
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
    main()
