"""Reads the folder of a run: its metrics, its options, and how its tokens were routed."""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from lightning_moe.config import MoEConfig, RouterConfig, TransformerConfig, from_mapping
from lightning_moe.metrics.routing_history import HISTORY_FILE, NO_HISTORY, RoutingHistory
from lightning_moe.report.series import EMPTY, Series

METRICS: Final = "metrics.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder says.

    Attributes:
        folder: where it was read from.
        metrics: all columns of `metrics.csv`, and of earlier parts of a resumed run, by name.
        options: `config.yaml`; empty where there is none.
        routing: what `ExpertLoadMonitor` wrote; empty where it wrote nothing.
    """

    folder: Path
    metrics: dict[str, Series]
    options: dict[str, object]
    routing: RoutingHistory

    def series(self, name: str) -> Series:
        """A column, empty if it was never logged."""
        return self.metrics.get(name, EMPTY)

    def option(self, path: str) -> object:
        """A value of `config.yaml` by its dotted name; None if it isn't there."""
        node: object = self.options
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return node

    @property
    def routers(self) -> list[RouterConfig | None]:
        """Of each layer in `routing`, its own options; None where `config.yaml` doesn't describe such a model."""
        unknown: list[RouterConfig | None] = [None] * len(self.routing.layers)
        model = self.options.get("model")
        if not isinstance(model, Mapping):
            return unknown
        try:
            layers = from_mapping(TransformerConfig, model).layers
        except (TypeError, ValueError):
            return unknown
        parts = [layer.feed_forward for layer in layers]
        routers = [part.router for part in parts if isinstance(part, MoEConfig)]
        return [*routers] if len(routers) == len(unknown) else unknown

    @property
    def silence(self) -> str:
        """Why there is no number of a training step; empty if there is one."""
        every = self.option("trainer.log_every_n_steps")
        is_short = isinstance(every, int) and self.num_steps < every
        if not is_short or any(name.startswith("train/") for name in self.metrics):
            return ""
        return (
            f"no training step was logged: trainer.log_every_n_steps={every}, and the run has not got that far; "
            "set it to 1 for a short run"
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps up to the last one that was logged."""
        return max((int(series.steps[-1]) + 1 for series in self.metrics.values()), default=0)


def read_run(folder: Path) -> Run:
    """Read a run folder of `lightning-moe train`, finished or still being written.

    Raises:
        FileNotFoundError: if the folder or its `metrics.csv` is missing.
        ValueError: if a file is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the run folder of a training run")
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(
            f"{folder} has no {METRICS}: either no training run wrote here, or it has logged nothing yet, "
            "or it ran without logger=csv"
        )
    return Run(
        folder=folder,
        metrics=read_metrics(folder),
        options=read_options(folder),
        routing=read_routing(folder),
    )


def read_metrics(folder: Path) -> dict[str, Series]:
    """All parts of a run's `metrics.csv`; each takes away what earlier parts say of its first step and later ones."""
    earlier = sorted(folder.glob("metrics_*.csv"), key=lambda path: (len(path.name), path.name))
    points: dict[str, dict[int, float]] = {}
    for path in [*earlier, folder / METRICS]:
        cells = list(_read_csv(path))
        start = min((step for step, _, _ in cells), default=math.inf)
        for values in points.values():
            for step in [step for step in values if step >= start]:
                del values[step]
        for step, name, value in cells:
            points.setdefault(name, {})[step] = value
    return {name: _series(values) for name, values in points.items() if values}


def read_options(folder: Path) -> dict[str, object]:
    """The resolved options of a run; empty where none were saved.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} is damaged: it holds no options")
    return options


def read_routing(folder: Path) -> RoutingHistory:
    """The routing history; empty where the run has no history.

    Raises:
        ValueError: if the file is damaged.
    """
    path = folder / HISTORY_FILE
    history = RoutingHistory.read(path) if path.is_file() else NO_HISTORY
    return history if len(history) else NO_HISTORY


def _series(points: Mapping[int, float]) -> Series:
    steps = sorted(points)
    return Series(
        steps=np.array(steps, dtype=np.int64), values=np.array([points[step] for step in steps])
    )


def _read_csv(path: Path) -> Iterator[tuple[int, str, float]]:
    """Step, column and value of every filled cell."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is no text file ({error})") from error
    # A run that goes on may be in the middle of its last line.
    lines = text[: text.rfind("\n") + 1].splitlines()
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    header = rows[0] if rows else []
    if "step" not in header:
        raise ValueError(f"{path} is damaged: its first line names no column `step`")
    for number, row in enumerate(rows[1:], start=2):
        try:
            cells = dict(zip(header, row, strict=True))
            step = int(cells["step"])
            values = {
                name: float(cell)
                for name, cell in cells.items()
                if cell and name not in ("step", "epoch")
            }
        except ValueError as error:
            raise ValueError(f"{path} is damaged in line {number}: {error}") from error
        for name, value in values.items():
            yield step, name, value
