"""Reads several runs: the jobs of a Hydra multirun, or run folders; only options that vary are kept."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """One of several runs.

    Attributes:
        name: Hydra's job number, or the run folder.
        options: those that differ between the runs, by key.
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


def read_runs(folders: Sequence[Path]) -> list[Job]:
    """Run folders, in this order, with the values of `config.yaml` that differ between them.

    Paths below a run's own folder always differ, and are left out.

    Raises:
        FileNotFoundError: if a folder or its `metrics.csv` is missing.
        ValueError: if a folder is given twice, or a file is damaged.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is compared with itself: {', '.join(map(str, folders))}")
    runs = [read_run(folder) for folder in folders]
    options = [dict(_leaves(run.options, run.folder.resolve())) for run in runs]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [
        Job(name=name, options=varied, results=_results(run), run=run, problem=run.silence)
        for name, varied, run in zip(names, _varied(options), runs, strict=True)
    ]


def _leaves(
    node: Mapping[str, object], folder: Path, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, folder, f"{prefix}{key}.")
        elif str(folder) not in str(value):
            yield f"{prefix}{key}", str(value)


def _varied(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of each run, the options that are not equal in all; empty text where it has none of that name."""
    keys = dict.fromkeys(key for given in options for key in given)
    varied = [key for key in keys if len({given.get(key) for given in options}) > 1]
    return [{key: given.get(key, "") for key in varied} for given in options]


def _results(run: Run) -> dict[str, float]:
    return {name: result(run) for name, result in RESULTS.items()}


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
    options = _varied([*started, *waiting.values()])
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
    return Job(
        name=folder.name, options=options, results=_results(run), run=run, problem=run.silence
    )


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
