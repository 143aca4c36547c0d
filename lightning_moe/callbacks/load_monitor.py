"""Is the load really even? Counts per layer and expert, logged and drawn."""

from collections import deque
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from lightning_moe.callbacks.step_statistics import moe_layers, step_statistics
from lightning_moe.nn import MoE
from lightning_moe.ops.load import load_max_over_mean


class ExpertLoadMonitor(L.Callback):
    """Logs the load of the busiest expert over the mean: per layer, and the worst layer of each step.

    Keys: `train/load_max_over_mean` (worst layer), `train/load_max_over_mean/layer_<i>` (i counts MoE layers).
    1 is even, E is everything on one expert. Counts are those of whole optimizer steps over all ranks.

    Args:
        heat_map: at the end, write `expert_load.png` (layers x experts) into the trainer's root folder.
        recent_steps: the picture shows the load of that many last steps.

    Raises:
        ValueError: at the start of fit, if the module has no MoE layer.
    """

    def __init__(self, *, heat_map: bool = True, recent_steps: int = 100) -> None:
        if recent_steps < 1:
            raise ValueError(f"recent_steps={recent_steps} must be at least 1")
        self.heat_map = heat_map
        self._recent: deque[tuple[Tensor, ...]] = deque(maxlen=recent_steps)
        self._layers: list[MoE] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers."""
        self._layers = moe_layers(pl_module, "ExpertLoadMonitor")
        self._recent.clear()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log this step's load."""
        statistics = step_statistics(pl_module, self._layers, "ExpertLoadMonitor")
        ratios = [load_max_over_mean(counts_E) for counts_E in statistics.requested]
        pl_module.log("train/load_max_over_mean", torch.stack(ratios).max(), prog_bar=True)
        pl_module.log_dict(
            {f"train/load_max_over_mean/layer_{i}": ratio for i, ratio in enumerate(ratios)}
        )
        if self.heat_map:
            self._recent.append(statistics.requested)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the picture."""
        if (
            self.heat_map
            and self._recent
            and trainer.is_global_zero
            and not getattr(trainer, "fast_dev_run", False)
        ):
            loads = [torch.stack(counts).sum(dim=0) for counts in zip(*self._recent, strict=True)]
            draw_heat_map(
                loads, Path(trainer.default_root_dir) / "expert_load.png", len(self._recent)
            )


def draw_heat_map(loads: list[Tensor], path: Path, num_steps: int) -> None:
    """Write a picture of each expert's load over the mean load of its layer.

    Args:
        loads: per layer, token copies of each expert; layers may differ in their number of experts.
        path: the PNG file; its folder is made.
        num_steps: steps that `loads` sums over, for the title.
    """
    # matplotlib takes half a second to import, and is needed once, at the end.
    from matplotlib.figure import Figure  # noqa: PLC0415

    image = torch.full((len(loads), max(load.numel() for load in loads)), float("nan"))
    for row, load_E in zip(image, loads, strict=True):
        row[: load_E.numel()] = load_E.cpu() * load_E.numel() / load_E.sum().clamp(min=1)
    figure = Figure(
        figsize=(max(6.0, 2 + 0.25 * min(image.shape[1], 64)), 1.8 + 0.3 * len(loads)),
        layout="constrained",
    )
    axes = figure.subplots()
    shown = axes.imshow(image.numpy(), aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0)
    axes.set(xlabel="expert", ylabel="MoE layer", yticks=range(len(loads)))
    worst = image.nan_to_num(0.0).max().item()
    axes.set_title(f"load / mean load over the last {num_steps} steps; busiest {worst:.2f}")
    figure.colorbar(shown, ax=axes, extend="max")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
