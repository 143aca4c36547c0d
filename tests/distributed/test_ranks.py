"""The helper that all distributed tests stand on."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.kit.ranks import run_ranks


def _sum_over_ranks(rank: int, _world: int, start_D: torch.Tensor) -> torch.Tensor:
    total_D = start_D + rank
    dist.all_reduce(total_D)
    return total_D


def _fail_on_rank_one(rank: int, _world: int) -> None:
    if rank == 1:
        raise ValueError("the reason is here")
    dist.all_reduce(torch.zeros(3))


def _hang_on_rank_one(rank: int, _world: int) -> None:
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.zeros(3))


def _crash(rank: int, _world: int) -> None:
    if rank == 1:
        os.abort()


def _name_import_hooks(_rank: int, _world: int) -> list[str]:
    return [type(finder).__module__ for finder in sys.meta_path]


def _describe(rank: int, world: int) -> tuple[int, int, int]:
    time.sleep(0.05 * (world - rank))
    return rank, world, torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_the_sum_of_all_ranks(world: int) -> None:
    results = run_ranks(_sum_over_ranks, world, torch.zeros(3))
    expected_D = torch.full((3,), float(sum(range(world))))
    assert len(results) == world
    for total_D in results:
        torch.testing.assert_close(total_D, expected_D)


def test_results_come_in_rank_order_from_ranks_of_one_thread() -> None:
    assert run_ranks(_describe, 3) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]


def test_a_failing_rank_raises_its_own_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*_fail_on_rank_one.*reason is here"):
        run_ranks(_fail_on_rank_one, 2)


def test_a_crashed_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"exit code by rank: \{1: -6\}"):
        run_ranks(_crash, 2)


def test_hanging_ranks_are_killed_at_the_time_limit() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="_hang_on_rank_one on 2 ranks took more than 2"):
        run_ranks(_hang_on_rank_one, 2, timeout_s=2.0)
    assert time.monotonic() - start < 100


def test_ranks_check_shapes_as_this_process_does() -> None:
    for modules in run_ranks(_name_import_hooks, 2):
        assert "jaxtyping._import_hook" in modules
