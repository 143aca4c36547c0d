"""Groups of one rank, and what the ledger notes. No process group exists here."""

import copy
import pickle

import pytest
import torch

from lightning_moe.parallel.collectives import AxisGroup, Ledger


def _alone() -> AxisGroup:
    return AxisGroup("ep", (3,), 0, None, Ledger())


def test_a_rank_alone_copies_and_communicates_nothing() -> None:
    group = _alone()
    given = torch.arange(6.0).view(3, 2)
    for collective in (group.reduce_scatter, group.all_gather, group.all_to_all):
        out = torch.zeros_like(given)
        assert collective(out, given) is None
        torch.testing.assert_close(out, given)
    kept = given.clone()
    assert group.all_reduce(kept) is None
    group.broadcast(kept)
    torch.testing.assert_close(kept, given)
    assert not group.ledger.calls


def test_copies_share_the_connection() -> None:
    group = _alone()
    assert copy.deepcopy(group) is group


def test_a_pickled_group_of_several_ranks_says_that_it_lost_its_connection() -> None:
    group = AxisGroup("ep", (0, 1), 1, None, Ledger())
    restored = pickle.loads(pickle.dumps(group))
    assert (restored.axis, restored.ranks, restored.index, restored.size) == ("ep", (0, 1), 1, 2)
    with pytest.raises(RuntimeError, match="connection of mesh axis ep was closed, or lost"):
        restored.all_reduce(torch.zeros(1))


def test_the_ledger_counts_calls_and_payload_bytes_by_kind_and_axis() -> None:
    ledger = Ledger()
    ledger.enter("all_reduce", "ep", torch.zeros(3, 5, dtype=torch.bfloat16))
    ledger.enter("all_reduce", "ep", torch.zeros(2, dtype=torch.float64))
    ledger.enter("all_gather", "stage", torch.zeros(7))
    assert ledger.calls == {("all_reduce", "ep"): 2, ("all_gather", "stage"): 1}
    assert ledger.bytes == {("all_reduce", "ep"): 30 + 16, ("all_gather", "stage"): 28}
    ledger.clear()
    assert not ledger.calls
    assert not ledger.bytes
