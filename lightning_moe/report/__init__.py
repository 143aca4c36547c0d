"""One page about a training run or a sweep, from the files of its folder: no network, no scripts, no other files."""

from lightning_moe.report.run import Run, read_run
from lightning_moe.report.run_page import run_page
from lightning_moe.report.series import Series
from lightning_moe.report.sweep import Job, is_sweep, read_sweep, sweep_csv
from lightning_moe.report.sweep_page import sweep_page

__all__ = [
    "Job",
    "Run",
    "Series",
    "is_sweep",
    "read_run",
    "read_sweep",
    "run_page",
    "sweep_csv",
    "sweep_page",
]
