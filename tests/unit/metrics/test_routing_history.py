"""A routing history: its entries join, merge and come back from the disk."""

from pathlib import Path

import numpy as np
import pytest

from lightning_moe.callbacks import read_history
from lightning_moe.metrics import routing_history
from lightning_moe.metrics.routing_history import (
    NO_HISTORY,
    LayerRouting,
    RoutingHistory,
    append_entry,
)


def _entry(step: int, copies: list[int], *, loads: list[int], value: float) -> RoutingHistory:
    """Of one step; every mean is `value`."""
    mean_S = np.array([value])
    layer = LayerRouting(
        requested_SE=np.array([copies]),
        kept_SE=np.array([copies]) // 2,
        rank_load_SR=np.array([loads]),
        lost_tokens_S=np.array([1]),
        balance_S=mean_S,
        inner_S=mean_S - 1,
        margin_S=mean_S,
        entropy_S=mean_S,
    )
    return RoutingHistory(steps_S=np.array([step]), num_steps_S=np.array([1]), layers=(layer,))


def _history(num_steps: int) -> RoutingHistory:
    return RoutingHistory.joined(
        [_entry(step, [step, 2, 0], loads=[step], value=float(step)) for step in range(num_steps)]
    )


def test_a_long_history_is_bounded_and_keeps_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_history, "MAX_ENTRIES", 4)
    entries: list[RoutingHistory] = []
    for step in range(11):
        loads = [step] if step else [0, 0]
        append_entry(entries, _entry(step, [step, 0], loads=loads, value=float(step)))
    history = RoutingHistory.joined(entries)
    assert history.num_steps_S.tolist() == [4, 2, 3, 2]
    assert history.steps_S.tolist() == [3, 5, 8, 10]
    (layer,) = history.layers
    assert layer.requested_SE[:, 0].tolist() == [6, 9, 21, 19]
    assert layer.kept_SE[:, 0].tolist() == [0 + 0 + 1 + 1, 2 + 2, 3 + 3 + 4, 4 + 5]
    assert layer.lost_tokens_S.tolist() == [4, 2, 3, 2]
    assert layer.margin_S.tolist() == [3, 5, 8, 10]
    # Weighted by copies; step 0 has none and no say.
    means = [(1 + 4 + 9) / 6, (16 + 25) / 9, (36 + 49 + 64) / 21, (81 + 100) / 19]
    assert layer.balance_S.tolist() == pytest.approx(means)
    assert layer.inner_S.tolist() == pytest.approx([mean - 1 for mean in means])
    # The second rank was there in step 0 only.
    assert layer.rank_load_SR.tolist() == [[6, -1], [9, -1], [21, -1], [19, -1]]


def test_entries_without_copies_merge_to_one_without_a_loss() -> None:
    empty = [_entry(step, [0, 0], loads=[0], value=1.0) for step in range(2)]
    assert np.isnan(RoutingHistory.joined(empty).merged().layers[0].balance_S).all()


def test_entries_that_a_resumed_run_repeats_are_left_out() -> None:
    kept = _history(5).before(3)
    assert kept.steps_S.tolist() == [0, 1, 2]
    assert kept.layers[0].requested_SE.tolist() == [[0, 2, 0], [1, 2, 0], [2, 2, 0]]
    assert len(NO_HISTORY.before(3)) == 0


def test_a_history_is_split_into_entries_and_joined_again() -> None:
    history = _history(3)
    again = RoutingHistory.joined(history.entries()).arrays()
    assert all(np.array_equal(again[name], rows) for name, rows in history.arrays().items())
    assert RoutingHistory.joined([]) is NO_HISTORY


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.npz"
    written = _history(3)
    written.write(path)
    assert [file.name for file in path.parent.iterdir()] == ["history.npz"]
    with np.load(path) as arrays:
        assert list(arrays) == [
            "steps",
            "num_steps",
            "requested_0",
            "kept_0",
            "rank_load_0",
            "lost_tokens_0",
            "balance_0",
            "inner_0",
            "margin_0",
            "entropy_0",
        ]
    found = read_history(path)
    assert all(np.array_equal(found[name], rows) for name, rows in written.arrays().items())


def test_a_damaged_history_is_named(tmp_path: Path) -> None:
    path = tmp_path / "routing_history.npz"
    with pytest.raises(FileNotFoundError):
        read_history(path)
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(ValueError, match=r"routing_history.npz is damaged"):
        read_history(path)
    np.savez(path, steps=np.arange(3), num_steps=np.ones(2))
    with pytest.raises(ValueError, match="don't have one row per entry"):
        read_history(path)
    np.savez(path, steps=np.arange(3), num_steps=np.ones(3), requested_0=np.ones((3, 4)))
    with pytest.raises(ValueError, match="it has no array 'kept_0'"):
        read_history(path)
