"""Tests here need torch's CUDA build and the runtime without a device: `make check-cuda`."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.cuda.table import TABLE, UNVERIFIED
from tests.cuda.waits import is_loaded


@pytest.fixture(autouse=True, scope="session")
def _runtime() -> None:
    if not is_loaded():
        pytest.skip("no CUDA runtime is loaded; see make check-cuda")


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was run beside the CPU's numbers, and what no run here can show."""
    for line in (*TABLE, *(UNVERIFIED if TABLE else ())):
        terminalreporter.write_line(line)
