"""A progress bar that fits into a line."""

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomTimeColumn,
    RichProgressBarTheme,
)
from rich.progress import BarColumn, ProgressColumn, TextColumn

_SHORT = {
    "train/loss": ("loss", "{:.3f}"),
    "train/tokens_per_second": ("tok/s", "{:,.0f}"),
    "train/load_max_over_mean": ("load", "{:.2f}"),
    "val/ce": ("val", "{:.3f}"),
    "val/bits_per_byte": ("bpb", "{:.3f}"),
}


class ProgressBar(RichProgressBar):
    """Lightning's bar with short names: full ones take two lines of a terminal of 100 columns.

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

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning writes "Epoch 0/-2" where steps, not epochs, end the run.
        if self.trainer.max_epochs == -1:
            return f"Epoch {current_epoch}".ljust(len(self.validation_description))
        return super()._get_train_description(current_epoch)


def _shorten(
    name: str, value: int | str | float | dict[str, float]
) -> tuple[str, int | str | float | dict[str, float]]:
    if name in _SHORT and isinstance(value, int | float):
        short, form = _SHORT[name]
        return short, form.format(value)
    return name, value
