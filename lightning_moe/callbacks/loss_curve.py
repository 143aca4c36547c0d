"""Draws the training and validation loss of a run."""

from pathlib import Path

import lightning as L
from torch import Tensor


class LossCurve(L.Callback):
    """Writes `loss.png` into the trainer's root folder at the end of fit: `train/ce` and `val/ce` by step (nats)."""

    def __init__(self) -> None:
        self._train: list[tuple[int, Tensor]] = []
        self._val: list[tuple[int, Tensor]] = []

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Remember the last step's loss; it stays on its device until the end."""
        step, value = trainer.global_step, trainer.callback_metrics.get("train/ce")
        if value is not None and (not self._train or self._train[-1][0] != step):
            self._train.append((step, value.detach().clone()))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember the validation loss."""
        value = trainer.callback_metrics.get("val/ce")
        if value is not None and not trainer.sanity_checking:
            self._val.append((trainer.global_step, value.detach().clone()))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the picture."""
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False) and self._train:
            draw_curves(
                {"train": self._train, "validation": self._val},
                Path(trainer.default_root_dir) / "loss.png",
            )


def draw_curves(curves: dict[str, list[tuple[int, Tensor]]], path: Path) -> None:
    """Write a picture of named (step, nats per token) series; empty ones are left out."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, needed once

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            steps, values = zip(*points, strict=True)
            style = {"linewidth": 0.8} if name == "train" else {"marker": "o"}
            axes.plot(steps, [value.item() for value in values], label=name, **style)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
