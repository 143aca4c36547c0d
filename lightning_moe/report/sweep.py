"""Reads the folder of a Hydra multirun: one job per folder, told apart by the options that vary."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from lightning_moe.report.routing import dead_experts
from lightning_moe.report.run import Run, read_run

RESULTS: Final[dict[str, Callable[[Run], float]]] = {
    "steps": lambda run: float(run.num_steps),
    "validation cross-entropy": lambda run: run.series("val/ce").last,
    "bits per byte": lambda run: run.series("val/bits_per_byte").last,
    "train cross-entropy": lambda run: run.series("train/ce").recent_median(),
    "busiest expert / mean": lambda run: run.series("train/load_max_over_mean").recent_median(),
    "balance loss": lambda run: run.series("train/balance_loss").recent_median(),
    "dead experts": lambda run: (
        float(sum(len(dead_experts(layer)) for layer in run.routing.layers))
        if len(run.routing)
        else math.nan
    ),
    "tokens per second": lambda run: run.series("train/tokens_per_second").recent_median(),
}
"""What is told of every job; NaN where it was not logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: of its folder, Hydra's job number.
        options: the overrides that differ between jobs, by key.
        results: one number per entry of `RESULTS`; all NaN where nothing could be read.
        run: None where nothing could be read.
        problem: why nothing could be read, or why there is no number of a training step.
    """

    name: str
    options: dict[str, str]
    results: dict[str, float]
    run: Run | None
    problem: str = ""


def is_sweep(folder: Path) -> bool:
    """Whether Hydra ran several jobs into this folder."""
    return (folder / "multirun.yaml").is_file()


def read_sweep(folder: Path, planned: Sequence[Sequence[str]] = ()) -> list[Job]:
    """All jobs in their order, also those that failed, have not logged anything yet or have not started.

    Args:
        folder: of the sweep.
        planned: the overrides of every job, whether it has started or not; jobs that have started need no entry.

    Raises:
        FileNotFoundError: if there is none.
    """
    folders = sorted(
        (path for path in folder.iterdir() if (path / ".hydra" / "overrides.yaml").is_file()),
        key=lambda path: (len(path.name), path.name),
    )
    if not folders:
        raise FileNotFoundError(f"{folder} is a sweep, but none of its jobs has started yet")
    started = [_overrides(path / ".hydra" / "overrides.yaml") for path in folders]
    waiting = {
        str(number): given
        for number, words in enumerate(planned)
        if (given := _by_key(words)) not in started
    }
    overrides = [*started, *waiting.values()]
    keys = dict.fromkeys(key for given in overrides for key in given)
    varied = [key for key in keys if len({given.get(key) for given in overrides}) > 1]
    options = [{key: given.get(key, "") for key in varied} for given in overrides]
    return [
        *map(_job, folders, options),
        *map(_waiting_job, waiting, options[len(started) :]),
    ]


def sweep_csv(jobs: list[Job]) -> str:
    """The table of all jobs: number, options that vary, results (empty where unknown)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *jobs[0].options, *RESULTS])
    for job in jobs:
        numbers = ["" if math.isnan(value) else f"{value:.6g}" for value in job.results.values()]
        writer.writerow([job.name, *job.options.values(), *numbers])
    return text.getvalue()


def _job(folder: Path, options: dict[str, str]) -> Job:
    try:
        run = read_run(folder)
    except (OSError, ValueError) as error:
        return _without_run(folder.name, options, str(error))
    results = {name: result(run) for name, result in RESULTS.items()}
    return Job(name=folder.name, options=options, results=results, run=run, problem=run.silence)


def _waiting_job(name: str, options: dict[str, str]) -> Job:
    reason = "it has not started: the sweep goes on, or was stopped"
    return _without_run(name, options, reason)


def _without_run(name: str, options: dict[str, str], problem: str) -> Job:
    nothing = dict.fromkeys(RESULTS, math.nan)
    return Job(name=name, options=options, results=nothing, run=None, problem=problem)


def _overrides(path: Path) -> dict[str, str]:
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return _by_key(words or [])


def _by_key(words: Sequence[object]) -> dict[str, str]:
    pairs = (str(word).partition("=") for word in words)
    return {key.lstrip("+"): value for key, _, value in pairs}
