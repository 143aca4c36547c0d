"""The page about a sweep: which options pay."""

import math
from pathlib import Path

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
    sections = [_jobs(jobs), _options(jobs), _trade(jobs), _curves(jobs)]
    return page(title, f"{len(jobs)} jobs in {folder.resolve()}", sections)


def _jobs(jobs: list[Job]) -> Section:
    names = _short_names(list(jobs[0].options)).values()
    rows = [
        [job.name, *job.options.values(), *(short(value) for value in job.results.values())]
        for job in jobs
    ]
    problems = "".join(warning(f"job {job.name}: {job.problem}") for job in jobs if job.problem)
    return Section(
        name="runs",
        title="Runs",
        about="At the end of each run: validation as last measured, everything else as the median of the second half. "
        "The same table is in sweep.csv.",
        content=problems + table(["job", *names, *RESULTS], rows),
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


def _curves(jobs: list[Job]) -> Section:
    known = [job for job in jobs if math.isfinite(job.results[QUALITY])]
    best = sorted(known, key=lambda job: job.results[QUALITY])[:NUM_COLOURS]
    parts = [
        line_chart(title, lines, y_label=label)
        for title, column, label in (
            ("Validation cross-entropy", "val/ce", "nats per token"),
            ("Busiest expert over the mean", "train/load_max_over_mean", "max / mean"),
        )
        if any(map(len, (lines := _lines(best, column)).values()))
    ]
    return Section(
        name="curves",
        title="Over time",
        about=f"The runs with the lowest validation loss, {NUM_COLOURS} at most.",
        content=charts(*parts) if parts else "",
        absent="no validation was logged yet.",
    )


def _lines(jobs: list[Job], column: str) -> dict[str, Series]:
    return {f"job {job.name}": job.run.series(column) for job in jobs if job.run is not None}


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
