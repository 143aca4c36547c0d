"""What tests of whole runs must not leave to each other."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group_of_ranks_is_left() -> Iterator[None]:
    """Leave the group that a strategy on one rank has made: Lightning would take the next run for one of several."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
