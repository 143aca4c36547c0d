"""`lightning-moe report`: the folder of a run or a sweep in, or several of runs, one HTML page out."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lightning_moe.cli.errors import show_error
from lightning_moe.files import atomic_write


def run(arguments: Sequence[str]) -> int:
    """Write the page; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    try:
        _report(options.folders, options.output)
    except Exception as error:
        show_error(error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe report",
        description="Write one HTML page about a run of `lightning-moe train`, finished or not: losses, balance, "
        "load of every expert and rank, dropped routes, throughput; or about all runs of a sweep, with their "
        "table beside it as sweep.csv; or about several runs side by side. The page needs no network and no other "
        "file.",
        epilog="example: lightning-moe report runs/tiny_cpu/2026-01-31_12-00-00",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a run folder, or that of a sweep (`train -m`); several run folders are compared",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: FOLDER/report.html; of several runs comparison.html)",
    )
    return parser


def _report(folders: Sequence[Path], output: Path | None) -> None:
    # Not needed for `--help`.
    from lightning_moe import report

    if len(folders) > 1:
        runs = report.read_runs(folders)
        _write(output or Path("comparison.html"), report.comparison_page(runs))
        return
    (folder,) = folders
    path = output or folder / "report.html"
    if not report.is_sweep(folder):
        _write(path, report.run_page(report.read_run(folder)))
        return
    jobs = report.read_sweep(folder, planned_jobs(folder))
    _write(path, report.sweep_page(folder, jobs))
    _write(path.with_name("sweep.csv"), report.sweep_csv(jobs))


def _write(path: Path, text: str) -> None:
    try:
        # A browser that reloads while a run goes on never sees half a page.
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise OSError(
            f"{path} can't be written: {error.strerror}; choose another file with --output"
        ) from error
    print(f"{path}: {len(text) / 1024:,.0f} KiB")


def planned_jobs(folder: Path) -> list[list[str]]:
    """The overrides of every job of the sweep in `folder`, in order.

    Empty where that can't be known beforehand: another sweeper than Hydra's basic one chooses as it goes, and `glob`
    needs the configs of that day.
    """
    try:
        plan = yaml.safe_load((folder / "multirun.yaml").read_text(encoding="utf-8"))
        hydra: Mapping[str, Mapping[str, object]] = plan["hydra"]
        sweeper, task = hydra["sweeper"], hydra["overrides"]["task"]
    except (yaml.YAMLError, KeyError, TypeError):
        return []
    params = sweeper.get("params") or {}
    if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
        return []
    assert isinstance(params, Mapping)
    assert isinstance(task, list)
    try:
        return _product([*(f"{key}={value}" for key, value in params.items()), *task])
    except HydraException:
        return []


def _product(words: list[str]) -> list[list[str]]:
    """As the basic sweeper has it: the last word about a key counts, and later keys vary fastest."""
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(words):
        key = override.get_key_element()
        values = (
            override.sweep_string_iterator()
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]
