"""What keeps ranks together needs no Trainer."""

import signal

import pytest
import torch

from lightning_moe.strategy.joint_ends import JointEnds
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import connect


def _ends(world: int) -> JointEnds:
    mesh, _ = connect(world, 1)
    return JointEnds(mesh.world, torch.device("cpu"))


def _repeats(rank: int, world: int) -> list[int]:
    """Two loaders: the ranks have 1 and 2 batches of the first, 3 each of the second."""
    ends = _ends(world)
    own = [1 + rank, 3]
    ends.begin_predict(own)
    return [ends.num_repeats() for _ in range(sum(own))]


def test_a_rank_repeats_the_last_batch_of_its_shorter_loader() -> None:
    assert run_ranks(_repeats, 2) == [[1, 0, 0, 0], [0, 0, 0, 0, 0]]


def _read(rank: int, world: int) -> list[int]:
    return list(_ends(world).loader(iter(range(3 - rank))))


@pytest.mark.filterwarnings("ignore:a data loader ended on one rank")
def test_loaders_of_unknown_length_end_with_the_shortest() -> None:
    assert run_ranks(_read, 2) == [[0, 1], [0, 1]]


def _stop(rank: int, world: int) -> tuple[bool, bool, int]:
    ends, agreed = _ends(world), []
    for received in (0, signal.SIGTERM if rank == 1 else 0):
        ends.stop.received = received
        ends.ask_to_stop()
        agreed.append(ends.agreed_to_stop())
    return *agreed, ends.stopped_by


def test_all_ranks_stop_by_the_signal_of_one() -> None:
    assert run_ranks(_stop, 2) == [(False, True, signal.SIGTERM)] * 2
