"""What a run tells as it goes: a progress bar that counts optimizer steps, and a file of metrics."""

import math
from collections.abc import Mapping
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomTimeColumn,
    RichProgressBarTheme,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.progress import BarColumn, ProgressColumn, TextColumn
from torch import Tensor

_SHORT = {
    "train/loss": ("loss", "{:.3f}"),
    "train/tokens_per_second": ("tok/s", "{:,.0f}"),
    "train/load_max_over_mean": ("load", "{:.2f}"),
    "val/ce": ("val", "{:.3f}"),
    "val/bits_per_byte": ("bpb", "{:.3f}"),
}


class ProgressBar(RichProgressBar):
    """Lightning's bar with short names: full ones take two lines of a terminal of 100 columns.

    In training it counts optimizer steps of the whole run, as `max_steps` does: those before a resumption are done,
    and neither an epoch nor accumulation begins the count anew.

    `load` is `train/load_max_over_mean`; `val` is `val/ce` (nats), shown only where there is no `bpb`,
    `val/bits_per_byte`.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate, theme=RichProgressBarTheme(metrics=""))

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The metrics of the bar, shortened; unknown ones as they are."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if "val/bits_per_byte" in metrics:
            metrics.pop("val/ce", None)
        known = [name for name in _SHORT if name in metrics]
        others = [name for name in metrics if name not in _SHORT]
        return dict(_shorten(name, metrics[name]) for name in known + others)

    def configure_columns(self, trainer: L.Trainer) -> list[ProgressColumn]:
        """Lightning's columns without batches per second (there are tokens per second), and with a shorter bar."""
        return [
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            CustomTimeColumn(style=self.theme.time),
        ]

    @property
    def total_train_batches(self) -> int | float:
        """Optimizer steps after which training ends; infinite if no number ends it."""
        trainer = self.trainer
        limits = [trainer.max_steps] if trainer.max_steps != -1 else []
        if trainer.max_epochs not in (None, -1) and math.isfinite(trainer.num_training_batches):
            per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
            limits.append(trainer.max_epochs * per_epoch)
        return min(limits, default=math.inf)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The bar of an earlier epoch goes on, with its count and its time."""
        if self.train_progress_bar_id is None or self.progress is None:
            super().on_train_epoch_start(trainer, pl_module)
        else:
            epoch = self._get_train_description(trainer.current_epoch)
            self.progress.update(self.train_progress_bar_id, description=epoch)
        self._update(self.train_progress_bar_id, trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Lightning's bar shows one more than the last argument."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.global_step - 1)

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning writes "Epoch 0/-2" where steps, not epochs, end the run.
        if self.trainer.max_epochs == -1:
            return f"Epoch {current_epoch}".ljust(len(self.validation_description))
        return super()._get_train_description(current_epoch)


class MetricsFile(CSVLogger):
    """Lightning's `metrics.csv` with one row per step, whoever logs at that step and however often."""

    def __init__(self, save_dir: str, name: str = "", version: str = "") -> None:
        super().__init__(save_dir, name=name, version=version)
        self._row: dict[str, float] = {}
        self._is_saved = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        """Add to the row of the step; Lightning calls `save` after each of its own calls."""
        numbers = {name: float(value) for name, value in metrics.items()}
        # Lightning writes the epoch as a whole number.
        numbers |= {name: int(numbers[name]) for name in ("epoch",) if name in numbers}
        writer = self.experiment
        if step is not None and self._row.get("step") == step:
            if self._is_saved:
                _remove_last_line(Path(writer.metrics_file_path))
            else:
                writer.metrics.pop()
            numbers = {**self._row, **numbers}
        writer.log_metrics(numbers, step)
        self._row, self._is_saved = dict(writer.metrics[-1]), False

    @rank_zero_only
    def save(self) -> None:
        """Write what was logged since the last call."""
        super().save()
        self._is_saved = True


def _remove_last_line(path: Path) -> None:
    text = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(text.rstrip(b"\r\n").rfind(b"\n") + 1)


def _shorten(
    name: str, value: int | str | float | dict[str, float]
) -> tuple[str, int | str | float | dict[str, float]]:
    if name in _SHORT and isinstance(value, int | float):
        short, form = _SHORT[name]
        return short, form.format(value)
    return name, value
