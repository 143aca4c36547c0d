"""What the load monitor costs: `python -m tests.peers.monitor_cost`.

Trains the model of `experiment=tiny_cpu` on random tokens and prints the time spent inside the monitor's own calls,
and inside the routers for the margins that it asks for, over the time of whole steps. Pictures and files at the end
of a run are timed by themselves.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_moe import MoEModule, OptimConfig, TokenBatch, TransformerConfig
from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.nn import router
from tests.peers.rounds import quieten

CALLS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class Stopwatch:
    """Adds up the seconds inside of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return call


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one training run: of all its steps, and of those inside monitor and routers; then of the end."""

    steps: float
    calls: float
    margins: float
    end: float

    @property
    def share(self) -> float:
        return (self.calls + self.margins) / self.steps


class _Clock(L.Callback):
    def on_train_start(self, *_: object) -> None:
        self.started = time.perf_counter()

    def on_train_end(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.started


def measure(num_steps: int, batch_size: int, length: int, every_n_steps: int) -> Cost:
    """One training run."""
    torch.manual_seed(0)
    config = dataclasses.replace(TransformerConfig.preset("tiny"), vocab_size=264)  # bytes
    calls, margins, end, clock = Stopwatch(), Stopwatch(), Stopwatch(), _Clock()
    monitor = ExpertLoadMonitor(every_n_steps=every_n_steps)
    for name in CALLS:
        setattr(monitor, name, calls.timed(getattr(monitor, name)))
    monitor.on_fit_end = end.timed(monitor.on_fit_end)
    ids_BS = torch.randint(config.vocab_size, (batch_size, length + 1))
    batch = TokenBatch(ids_BS=ids_BS[:, :-1].contiguous(), labels_BS=ids_BS[:, 1:].contiguous())
    loader = DataLoader([batch] * num_steps, batch_size=None, collate_fn=lambda same: same)
    module = MoEModule(config, OptimConfig(schedule="constant", warmup=0, decay=0))
    original = router._token_routes
    router._token_routes = margins.timed(original)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                default_root_dir=Path(folder),
                accelerator="cpu",
                max_epochs=1,
                callbacks=[monitor, _Observed(monitor, calls), clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
            )
            trainer.fit(module, loader, [])
    finally:
        router._token_routes = original
    return Cost(steps=clock.seconds, calls=calls.seconds, margins=margins.seconds, end=end.seconds)


class _Observed(L.Callback):
    """Times what the monitor does with every micro-batch's records."""

    def __init__(self, monitor: ExpertLoadMonitor, watch: Stopwatch) -> None:
        self.monitor, self.watch = monitor, watch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        window = pl_module.window
        window.observers = [self.watch.timed(observe) for observe in window.observers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--every-n-steps", type=int, default=10)
    options = parser.parse_args()
    costs = [
        measure(options.steps, options.batch_size, options.length, options.every_n_steps)
        for _ in range(options.rounds)
    ]
    print(
        f"{options.rounds} runs of {options.steps} steps, an entry every {options.every_n_steps}:"
    )
    for name, values in (
        ("step (ms)", [1e3 * cost.steps / options.steps for cost in costs]),
        ("monitor's calls per step (ms)", [1e3 * cost.calls / options.steps for cost in costs]),
        ("margins per step (ms)", [1e3 * cost.margins / options.steps for cost in costs]),
        ("both over step (%)", [100 * cost.share for cost in costs]),
        ("files and pictures, once (ms)", [1e3 * cost.end for cost in costs]),
    ):
        low, median, high = min(values), statistics.median(values), max(values)
        print(f"  {name:32} median {median:8.3f}   range {low:.3f} - {high:.3f}")


if __name__ == "__main__":
    quieten()
    main()
