"""Two processes, one of which fails or is told to stop: how soon all end, what they say, what survives."""

from pathlib import Path

import pytest
import torch

from lightning_moe.checkpoint.whole import read_whole
from tests.e2e.rank_script import FAULT_STEP
from tests.kit.rank_trainers import Plan, run_plans
from tests.kit.ranks import run_ranks
from tests.kit.script_runs import Ended, run_script

# Ends of processes take seconds, on a busy machine many; a hang would take ten minutes.
SOON_S = 100.0


def _assert_over(ended: Ended, code: int) -> None:
    assert ended.code == code
    assert ended.seconds < SOON_S
    assert ended.running == []


@pytest.mark.parametrize(("rank", "saver"), [(0, ()), (1, ("saver=1",))])
def test_an_error_on_one_rank_ends_all_and_is_seen(
    tmp_path: Path, rank: int, saver: tuple[str, ...]
) -> None:
    ended = run_script(tmp_path, f"raise@{rank}", *saver)
    _assert_over(ended, 1)
    assert f"[rank {rank}] ValueError at step {FAULT_STEP}: the first cause" in ended.said
    assert f"[rank{rank}]: ValueError: the first cause" in ended.said
    if saver:
        assert "saving needs all ranks" in ended.said
    assert list(tmp_path.glob("*.ckpt")) == []


def test_a_batch_too_large_for_static_dispatch_on_one_rank_ends_all_and_is_named(
    tmp_path: Path,
) -> None:
    # The others wait for its rows; they need not wait for the timeout.
    ended = run_script(tmp_path, "grow@1", "dispatcher=static")
    _assert_over(ended, 1)
    assert f"[rank 1] RuntimeError at step {FAULT_STEP}: a micro-batch of 64 tokens" in ended.said
    assert "larger than the 32 that strategy.dispatcher=static has slots for" in ended.said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sigterm_to_any_rank_stops_all_after_the_step_and_the_run_resumes_exactly(
    tmp_path: Path, rank: int
) -> None:
    ended = run_script(tmp_path, f"term@{rank}")
    _assert_over(ended, 143)
    assert ended.steps == [str(FAULT_STEP + 1)] * 2
    assert f"stopped by SIGTERM at step {FAULT_STEP + 1}; resume with ckpt_path=" in ended.said
    assert [path.name for path in tmp_path.glob("*.ckpt*")] == ["sigterm.ckpt"]
    assert read_whole(tmp_path / "sigterm.ckpt")["global_step"] == FAULT_STEP + 1
    if rank == 1:
        straight, resumed = run_ranks(
            run_plans, 2, [Plan(2, 7), Plan(2, 7, tmp_path / "sigterm.ckpt", seed=5)]
        )[0]
        torch.testing.assert_close(resumed.weights, straight.weights, rtol=0, atol=0)


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "kill@1")
    _assert_over(ended, 1)
    assert "[local rank 1] was ended by SIGKILL" in ended.said


def test_a_rank_that_hangs_ends_the_run_after_the_timeout_and_is_named(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "stop@1", "timeout=8")
    _assert_over(ended, 1)
    assert "Timed out waiting 8000ms" in ended.said
    assert "[local rank 1] did not end by itself: killed" in ended.said


def test_an_interrupt_ends_all_ranks_at_once(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "int@0")
    _assert_over(ended, 1)
    assert f"[rank 0] KeyboardInterrupt at step {FAULT_STEP}" in ended.said


def test_four_ranks_stop_together(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "term@3", "devices=4")
    _assert_over(ended, 143)
    assert ended.steps == [str(FAULT_STEP + 1)] * 4
