"""One page about a run, a sweep or runs side by side, from files of their folders: no network, script or other file."""

from lightning_moe.report.run import Run, read_run
from lightning_moe.report.run_page import run_page
from lightning_moe.report.series import Series
from lightning_moe.report.sweep import Job, is_sweep, read_runs, read_sweep, sweep_csv
from lightning_moe.report.sweep_page import comparison_page, sweep_page

__all__ = [
    "Job",
    "Run",
    "Series",
    "comparison_page",
    "is_sweep",
    "read_run",
    "read_runs",
    "read_sweep",
    "run_page",
    "sweep_csv",
    "sweep_page",
]
