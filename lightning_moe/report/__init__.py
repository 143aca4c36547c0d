"""One page about a training run, from the files of its folder: no network, no scripts, no other files needed."""

from lightning_moe.report.run import Run, read_run
from lightning_moe.report.run_page import run_page
from lightning_moe.report.series import Series

__all__ = ["Run", "Series", "read_run", "run_page"]
