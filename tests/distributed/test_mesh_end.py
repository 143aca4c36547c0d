"""How a mesh lets go of its ranks."""

import os
from datetime import timedelta

import pytest
import torch

from lightning_moe.parallel.collectives import ProcessMesh
from lightning_moe.parallel.mesh import MeshShape
from tests.kit.ranks import run_ranks


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _close(_rank: int, world: int) -> tuple[int, int, float]:
    mesh = ProcessMesh(MeshShape(world=world, ep=2), timedelta(seconds=20))
    total_1 = torch.ones(1)
    mesh.ep.all_reduce(total_1)
    connected = _threads()
    mesh.close()
    with pytest.raises(RuntimeError, match="mesh axis ep was closed"):
        mesh.ep.all_reduce(total_1)
    return connected, _threads(), total_1.item()


def test_closing_ends_the_threads_behind_the_groups() -> None:
    for connected, left, total in run_ranks(_close, 2):
        assert left < connected
        assert total == 2.0
