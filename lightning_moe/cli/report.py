"""`lightning-moe report`: the folder of a run or a sweep in, one HTML page out."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_moe.cli.errors import show_error
from lightning_moe.files import atomic_write


def run(arguments: Sequence[str]) -> int:
    """Write the page; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    try:
        _report(options.folder, options.output)
    except Exception as error:
        show_error(error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe report",
        description="Write one HTML page about a run of `lightning-moe train`, finished or not: losses, balance, "
        "load of every expert and rank, dropped routes, throughput; or about all runs of a sweep, with their "
        "table beside it as sweep.csv. The page needs no network and no other file.",
        epilog="example: lightning-moe report runs/tiny_cpu/2026-01-31_12-00-00",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a run folder, or that of a sweep (`train -m`)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page (default: FOLDER/report.html)"
    )
    return parser


def _report(folder: Path, output: Path | None) -> None:
    # Not needed for `--help`.
    from lightning_moe import report
    from lightning_moe.cli.sweep_plan import planned_jobs

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
