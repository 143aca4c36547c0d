"""What the progress bar counts: optimizer steps of the whole run."""

import csv
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_moe.cli.progress import MetricsFile, ProgressBar


class _Counts(L.Callback):
    """What the bar shows after every micro-batch: steps done and steps in all."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.shown: list[tuple[float, float | None]] = []

    def on_train_batch_end(self, *_: object) -> None:
        task = self.bar.train_progress_bar
        self.shown.append((task.completed, task.total))


def _shown(ckpt_path: Path | None = None, **options: object) -> list[tuple[float, float | None]]:
    counts = _Counts(bar := ProgressBar())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[bar, counts],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(BoringModel(), ckpt_path=ckpt_path)
    if ckpt_path is None and "default_root_dir" in options:
        trainer.save_checkpoint(Path(str(options["default_root_dir"])) / "here.ckpt")
    return counts.shown


def test_micro_batches_of_one_step_do_not_advance_the_bar() -> None:
    shown = _shown(max_steps=3, max_epochs=-1, accumulate_grad_batches=2)
    assert shown == [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (3, 3)]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    _shown(max_steps=3, max_epochs=-1, default_root_dir=tmp_path)
    shown = _shown(tmp_path / "here.ckpt", max_steps=5, max_epochs=-1)
    assert shown == [(4, 5), (5, 5)]


def test_epochs_of_one_batch_do_not_begin_the_count_anew() -> None:
    assert _shown(max_steps=3, max_epochs=-1, overfit_batches=1) == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("max_steps", "batches", "total"),
    # Five micro-batches are three steps, the last of one micro-batch.
    [(-1, 5, 6), (4, 5, 4), (9, 5, 6), (-1, math.inf, math.inf), (9, math.inf, 9)],
)
def test_what_ends_first_is_the_total(max_steps: int, batches: float, total: float) -> None:
    bar = ProgressBar()
    bar._trainer = trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        max_steps=max_steps,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit_loop.max_batches = batches
    assert bar.total_train_batches == total


def test_a_step_is_one_row_however_often_it_is_logged(tmp_path: Path) -> None:
    logger = MetricsFile(str(tmp_path))
    # The monitor's values, the step's own, and a validation after both are on disk.
    logger.log_metrics({"load": 1.5}, step=3)
    for step, metrics in (
        (3, {"loss": torch.tensor(2.0), "epoch": 0}),
        (3, {"val": 4.0, "epoch": 0}),
        (7, {"loss": 1.0, "epoch": 1}),
    ):
        logger.log_metrics(metrics, step=step)
        logger.save()
    logger.finalize("success")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"epoch": "0", "load": "1.5", "loss": "2.0", "step": "3", "val": "4.0"},
        {"epoch": "1", "load": "", "loss": "1.0", "step": "7", "val": ""},
    ]
