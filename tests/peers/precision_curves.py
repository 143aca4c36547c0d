"""What eight bits cost in loss: `python -m tests.peers.precision_curves`.

Trains the preset `tiny` on the sources of Python's standard library four times, with the same seed and data: experts
in float32, in MXFP8 with both rules for scales, and in row-wise FP8, emulated by float32 matmuls of the codes. Prints
the losses at the end and writes a picture of all four curves.
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
        train_ce: mean over the last steps (nats per token).
        val_ce: at the end (nats per token).
        seconds: of training.
    """

    name: str
    train_ce: float
    val_ce: float
    seconds: float


def train(
    name: str, data: DataConfig, steps: int, val_batches: int
) -> tuple[Row, list[tuple[int, torch.Tensor]]]:
    """One run, from the same weights and batches as the others."""
    L.seed_everything(0, verbose=False)
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
        train_ce=mean(value.item() for _, value in losses.points[-LAST_STEPS:]),
        val_ce=trainer.callback_metrics["val/ce"].item(),
        seconds=time.perf_counter() - started,
    )
    return row, losses.points


def table(rows: list[Row], steps: int) -> Table:
    """Losses beside those of the first row."""
    result = Table(title=f"preset tiny after {steps} steps")
    for heading in ("experts", "train ce", "over float32", "val ce", "over float32", "seconds"):
        result.add_column(heading)
    first = rows[0]
    for row in rows:
        result.add_row(
            row.name,
            f"{row.train_ce:.4f}",
            f"{row.train_ce / first.train_ce - 1:+.2%}",
            f"{row.val_ce:.4f}",
            f"{row.val_ce / first.val_ce - 1:+.2%}",
            f"{row.seconds:.0f}",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
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
    rows, curves = [], {}
    for name in RUNS:
        row, curves[name] = train(name, data, options.steps, options.val_batches)
        rows.append(row)
    Console(width=100).print(table(rows, options.steps))
    draw_curves(curves, options.picture)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return rows


if __name__ == "__main__":
    main()
