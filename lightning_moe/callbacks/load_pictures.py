"""Pictures of expert load: experts of each layer at the end, and the busiest expert of each layer over training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_moe.metrics.routing_history import RoutingHistory
from lightning_moe.ops.load import load_max_over_mean, relative_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_pictures(history: RoutingHistory, recent_steps: int, folder: Path) -> dict[Path, "Figure"]:
    """Draw a routing history into `expert_load.png` and `expert_load_history.png`.

    Args:
        history: at least one entry.
        recent_steps: the first picture adds up the last entries until they cover so many steps.
        folder: of the files.
    """
    num_steps = np.cumsum(history.num_steps_S[::-1])
    num_recent = min(int(np.searchsorted(num_steps, recent_steps)) + 1, len(history))
    by_layer = [torch.from_numpy(layer.requested_SE) for layer in history.layers]
    recent = [load_SE[-num_recent:].sum(dim=0) for load_SE in by_layer]
    pictures = {
        folder / "expert_load.png": heat_map(recent, int(num_steps[num_recent - 1])),
        folder / "expert_load_history.png": load_over_training(by_layer, history.steps_S.tolist()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, figure in pictures.items():
        figure.savefig(path, dpi=120)
    return pictures


def show_pictures(pictures: Mapping[Path, "Figure"], loggers: Sequence[Logger], step: int) -> None:
    """Pass saved pictures to loggers that take them, by `add_figure` (TensorBoard) or `log_image` (W&B)."""
    for path, figure in pictures.items():
        key = f"train/{path.stem}"
        for logger in loggers:
            add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
            log_image = getattr(logger, "log_image", None)
            if add_figure is not None:
                add_figure(key, figure, step, close=False)
            elif log_image is not None:
                log_image(key=key, images=[str(path)], step=step)


def heat_map(loads: Sequence[Tensor], num_steps: int) -> "Figure":
    """Each expert's load over the mean load of its layer.

    Args:
        loads: per layer, token copies of each expert; layers may differ in their number of experts.
        num_steps: steps that `loads` sums over, for the title.
    """
    image = torch.full((len(loads), max(load.numel() for load in loads)), float("nan"))
    for row, load_E in zip(image, loads, strict=True):
        row[: load_E.numel()] = relative_load(load_E)
    worst = image.nan_to_num(0.0).max().item()
    title = f"load / mean load over the last {num_steps} steps; busiest {worst:.2f}"
    return _picture(image.numpy(), "expert", title, limits=(0.0, 2.0), colors="RdBu_r")


def load_over_training(loads: Sequence[Tensor], steps: Sequence[int]) -> "Figure":
    """Busiest expert over the mean of each layer, by time.

    Args:
        loads: per layer, (S, E) token copies of each expert.
        steps: (S) the last step of each row.
    """
    image = torch.stack([load_max_over_mean(load) for load in loads]).numpy()
    title = f"busiest expert / mean load, steps {steps[0]} to {steps[-1]}; worst {image.max():.2f}"
    figure = _picture(
        image, "optimizer step", title, limits=(1.0, max(2.0, image.max())), colors="viridis"
    )
    axes = figure.axes[0]
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    return figure


def _picture(
    image: np.ndarray, x_label: str, title: str, *, limits: tuple[float, float], colors: str
) -> "Figure":
    """A picture whose rows are MoE layers."""
    # matplotlib takes half a second to import, and is needed once, at the end.
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, needed once

    height, width = image.shape
    figure = Figure(
        figsize=(max(6.0, 2 + 0.25 * min(width, 64)), 1.8 + 0.3 * height), layout="constrained"
    )
    axes = figure.subplots()
    shown = axes.imshow(image, aspect="auto", cmap=colors, vmin=limits[0], vmax=limits[1])
    axes.set(xlabel=x_label, ylabel="MoE layer", yticks=range(height))
    axes.set_title(title)
    figure.colorbar(shown, ax=axes, extend="max")
    return figure
