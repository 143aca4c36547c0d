"""The race of two ranks runs, and all variants compute the same. No time is checked."""

import pytest

from tests.peers.rank_speed import FSDP_VARIANTS, Setting, compare


@pytest.mark.distributed
def test_our_ranks_and_those_of_fsdp_start_from_the_same_loss() -> None:
    setting = Setting(num_experts=8, tokens=256, micro_batches=2, d_model=32, hidden=16, layers=1)
    measured = compare(setting, 1, 120.0)
    assert set(measured.seconds) == {"ours", *FSDP_VARIANTS}
    assert all(len(seconds) == 1 for seconds in measured.seconds.values())
