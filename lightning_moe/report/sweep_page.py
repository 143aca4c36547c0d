"""The pages about several runs: a sweep, or runs side by side."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from lightning_moe.report.chart_scale import short
from lightning_moe.report.charts import line_chart, scatter
from lightning_moe.report.page import NUM_COLOURS, Section, charts, page, table, warning
from lightning_moe.report.series import Series
from lightning_moe.report.sweep import RESULTS, Job

QUALITY, LOAD = "validation cross-entropy", "busiest expert / mean"


def sweep_page(folder: Path, jobs: list[Job]) -> str:
    """The page about all `jobs` of the sweep in `folder`, a whole HTML document."""
    title = f"Sweep - {folder.resolve().name}"
    about = f"The runs with the lowest validation loss, {NUM_COLOURS} at most."
    best = [replace(job, name=f"job {job.name}") for job in _best(jobs)]
    sections = [
        _jobs(jobs, "job", " The same table is in sweep.csv."),
        _options(jobs),
        _trade(jobs),
        _curves(best, _CURVES[:2], about),
    ]
    return page(title, f"{len(jobs)} jobs in {folder.resolve()}", sections)


def comparison_page(runs: list[Job]) -> str:
    """The page about run folders side by side, a whole HTML document."""
    names = " and ".join(run.name for run in runs)
    sections = [_jobs(runs, "run"), _curves(runs, _CURVES, "All runs on the same axes.")]
    return page(f"Comparison - {names}", f"{len(runs)} runs side by side", sections)


def _jobs(jobs: list[Job], kind: str, also: str = "") -> Section:
    names = _short_names(list(jobs[0].options)).values()
    rows = [
        [job.name, *job.options.values(), *(short(value) for value in job.results.values())]
        for job in jobs
    ]
    problems = "".join(warning(f"{kind} {job.name}: {job.problem}") for job in jobs if job.problem)
    return Section(
        name="runs",
        title="Runs",
        about="At the end of each run: validation as last measured, everything else as the median of the second half."
        + also,
        content=problems + table([kind, *names, *RESULTS], rows),
        absent="",
    )


def _options(jobs: list[Job]) -> Section:
    """Means over all runs with a value: what the option does, whatever the others are."""
    shown = [name for name in RESULTS if name != "steps"]
    rows = []
    for key, short_name in _short_names(list(jobs[0].options)).items():
        for value in dict.fromkeys(job.options[key] for job in jobs):
            members = [job for job in jobs if job.options[key] == value]
            means = [_mean([job.results[name] for job in members]) for name in shown]
            rows.append([f"{short_name}={value}", str(len(members)), *map(short, means)])
    return Section(
        name="options",
        title="What each option does",
        about="Means over all runs that share a value.",
        content=table(["option", "runs", *shown], rows) if rows else "",
        absent="no option varies.",
    )


def _trade(jobs: list[Job]) -> Section:
    points = {
        job.name: (job.results[LOAD], job.results[QUALITY])
        for job in jobs
        if math.isfinite(job.results[LOAD]) and math.isfinite(job.results[QUALITY])
    }
    content = ""
    if points:
        content = charts(
            scatter(
                "Validation loss over load",
                points,
                x_label="busiest expert / mean",
                y_label="nats per token",
            )
        )
    return Section(
        name="trade",
        title="Balance against quality",
        about="Each number is a run. Down is a better model, left is a more even load.",
        content=content,
        absent="no run has logged both validation loss and load.",
    )


_CURVES: Final = (
    ("Validation cross-entropy", "val/ce", "nats per token"),
    ("Busiest expert over the mean", "train/load_max_over_mean", "max / mean"),
    ("Training cross-entropy", "train/ce", "nats per token"),
    ("Balance loss, mean of the layers", "train/balance_loss", "1 = even"),
    ("Gradient norm before clipping", "train/grad_norm", "2-norm"),
    ("Tokens per second", "train/tokens_per_second", "tokens / s"),
)


def _best(jobs: list[Job]) -> list[Job]:
    known = [job for job in jobs if math.isfinite(job.results[QUALITY])]
    return sorted(known, key=lambda job: job.results[QUALITY])[:NUM_COLOURS]


def _curves(jobs: list[Job], curves: Sequence[tuple[str, str, str]], about: str) -> Section:
    parts = [
        line_chart(title, lines, y_label=label)
        for title, column, label in curves
        if any(map(len, (lines := _lines(jobs, column)).values()))
    ]
    return Section(
        name="curves",
        title="Over time",
        about=about,
        content=charts(*parts) if parts else "",
        absent="nothing was logged yet.",
    )


def _lines(jobs: list[Job], column: str) -> dict[str, Series]:
    return {job.name: job.run.series(column) for job in jobs if job.run is not None}


def _short_names(keys: list[str]) -> dict[str, str]:
    """`lb_loss_weight` for `model.moe.router.lb_loss_weight`, with as much before it as no other key ends in."""
    names = {}
    for key in keys:
        parts = key.split(".")
        tails = [".".join(parts[first:]) for first in reversed(range(len(parts)))]
        alone = (tail for tail in tails if sum(f".{k}".endswith(f".{tail}") for k in keys) == 1)
        names[key] = next(alone, key)
    return names


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
