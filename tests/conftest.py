"""Settings of every test process, and the marks that divide the tests into tiers."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Before anything imports a hub client: no test may reach the network.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
)

import jaxtyping
import pytest
import torch

TIERS = ("distributed", "golden", "e2e", "parity", "gpu", "cuda")

# Rank processes are forked from a server that has these imported already; without it each
# rank pays for them again, seconds each. rank_preload comes first: it installs the shape checker.
multiprocessing.set_forkserver_preload(
    [
        "tests.kit.rank_preload",
        "torch.distributed",
        "torch._dynamo",
        "torch.testing._comparison",
        "tests.kit.ranks",
    ]
)


def pytest_configure() -> None:
    """Use one thread, like a rank: sums keep one order, and times do not hang on other load.

    On 2 shared cores a tiny gradcheck took 5.0 to 5.2 ms with one thread, 5.4 to 135 ms with two;
    only larger tensors than tests use gained (matrices of 256: 1.7 times as fast with two).
    """
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test by the folder it lies in; the serial tiers keep the order of TIERS."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in TIERS:
            item.add_marker(folder)
    items.sort(
        key=lambda item: next((TIERS.index(t) for t in TIERS if item.get_closest_marker(t)), -1)
    )


@pytest.fixture
def generator() -> torch.Generator:
    """Give a CPU generator that starts at the same place in every test."""
    return torch.Generator().manual_seed(0)


@contextmanager
def _without_shape_checker() -> Iterator[None]:
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def shape_checker_off() -> Iterator[None]:
    """Let the code refuse wrong types itself: the shape checker would be first."""
    with _without_shape_checker():
        yield


@pytest.fixture(scope="module")
def shape_checker_off_in_module() -> Iterator[None]:
    """The same for hypothesis, which allows neither the random numbers that it draws nor fixtures per test."""
    with _without_shape_checker():
        yield
