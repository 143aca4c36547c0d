"""What eight bits cost in loss: `python -m tests.peers.precision_curves`.

Trains the preset `tiny` on the sources of Python's standard library four times per seed, with the same weights and
data: experts in float32, in MXFP8 with both rules for scales, and in row-wise FP8, emulated by float32 matmuls of the
codes. Prints the losses at the end, means over seeds with the range of differences, and writes a picture of the four
curves of the first seed.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Final

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from lightning_moe import (
    DataConfig,
    MoEModule,
    MoEPrecision,
    OptimConfig,
    TokenDataModule,
    TransformerConfig,
)
from lightning_moe.callbacks.loss_curve import draw_curves
from tests.peers.rounds import quieten

LAST_STEPS: Final = 30
RUNS: Final[dict[str, MoEPrecision | None]] = {
    "float32": None,
    "mxfp8 rceil": MoEPrecision("mxfp8", "32-true", emulate=True),
    "mxfp8 floor": MoEPrecision("mxfp8", "32-true", scale_mode="floor", emulate=True),
    "fp8_rowwise": MoEPrecision("fp8_rowwise", "32-true", emulate=True),
}


class _TrainLoss(L.Callback):
    """Cross-entropy of every step (nats per token)."""

    def __init__(self) -> None:
        self.points: list[tuple[int, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Remember it."""
        self.points.append((trainer.global_step, trainer.callback_metrics["train/ce"].clone()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run.

    Attributes:
        seed: of weights and order of data.
        train_ce: mean over the last steps (nats per token).
        val_ce: at the end (nats per token).
        seconds: of training.
    """

    name: str
    seed: int
    train_ce: float
    val_ce: float
    seconds: float


def train(
    name: str, seed: int, data: DataConfig, steps: int, val_batches: int
) -> tuple[Row, list[tuple[int, torch.Tensor]]]:
    """One run, from the same weights and batches as the others."""
    L.seed_everything(seed, verbose=False)
    warmup, decay = steps // 10, max(1, steps // 4)
    module = MoEModule(
        TransformerConfig.preset("tiny"),
        OptimConfig(lr=3e-3, schedule="wsd", warmup=warmup, decay=decay),
    )
    losses = _TrainLoss()
    precision = RUNS[name]
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[losses],
        plugins=None if precision is None else [precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        limit_val_batches=val_batches,
    )
    started = time.perf_counter()
    trainer.fit(module, TokenDataModule(data))
    row = Row(
        name=name,
        seed=seed,
        train_ce=mean(value.item() for _, value in losses.points[-LAST_STEPS:]),
        val_ce=trainer.callback_metrics["val/ce"].item(),
        seconds=time.perf_counter() - started,
    )
    return row, losses.points


def table(rows: list[Row], steps: int) -> Table:
    """Mean losses over seeds, beside those of the first name; seed by seed in the range."""
    by_name = {name: [row for row in rows if row.name == name] for name in RUNS}
    first, *_ = by_name.values()
    result = Table(title=f"preset tiny after {steps} steps, {len(first)} seeds")
    for heading in ("experts", "train ce", "over float32", "val ce", "over float32", "seconds"):
        result.add_column(heading)
    for name, runs in by_name.items():
        result.add_row(
            name,
            *_compared([row.train_ce for row in runs], [row.train_ce for row in first]),
            *_compared([row.val_ce for row in runs], [row.val_ce for row in first]),
            f"{mean(row.seconds for row in runs):.0f}",
        )
    return result


def _compared(losses: list[float], others: list[float]) -> tuple[str, str]:
    changes = [loss / other - 1 for loss, other in zip(losses, others, strict=True)]
    spread = f" [{min(changes):+.2%} .. {max(changes):+.2%}]"
    return f"{mean(losses):.4f}", f"{mean(changes):+.2%}{spread if len(changes) > 1 else ''}"


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch-size", type=int, default=8, help="rows of 128 tokens")
    parser.add_argument(
        "--text", nargs="*", default=[], help="files instead of the library's sources"
    )
    parser.add_argument("--val-batches", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=Path("precision_curves.png"))
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    data = DataConfig(paths=tuple(options.text), sequence_length=128, batch_size=options.batch_size)
    rows: list[Row] = []
    curves: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for seed in options.seeds:
        for name in RUNS:
            row, losses = train(name, seed, data, options.steps, options.val_batches)
            rows.append(row)
            curves.setdefault(name, losses)
    Console(width=120).print(table(rows, options.steps))
    draw_curves(curves, options.picture)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return rows


if __name__ == "__main__":
    quieten()
    main()
