"""The order of rows, and loaders that go on from a state."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_moe.data import (
    IGNORE_INDEX,
    ResumableDataLoader,
    RowOrder,
    TokenSampler,
    TokenStream,
    WindowDataset,
)
from lightning_moe.data.packing import TokenRow
from lightning_moe.data.sampling import shuffled_rows


class ReadingDataset(WindowDataset):
    """Rows that remember which of them were read."""

    read: list[int]

    def __getitem__(self, index: int) -> TokenRow:
        self.read.append(index)
        return super().__getitem__(index)


def make_rows(num_rows: int) -> ReadingDataset:
    """Row `i` starts with token `3 * i`."""
    tokens = np.arange(3 * num_rows + 1, dtype=np.uint16)
    dataset = ReadingDataset(TokenStream([tokens]), 3, eos_id=9999)
    dataset.read = []
    return dataset


def make_loader(num_rows: int = 11, num_workers: int = 0, **order: object) -> ResumableDataLoader:
    options = {"batch_size": 2, "seed": 5} | order
    return ResumableDataLoader(make_rows(num_rows), RowOrder(**options), num_workers=num_workers)


def rows_of(loader: ResumableDataLoader) -> list[list[int]]:
    return [(batch.ids_BS[:, 0] // 3).tolist() for batch in loader]


@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_ranks_share_out_the_head_of_one_order_in_full_batches(
    num_rows: int, batch_size: int, world_size: int, epoch: int
) -> None:
    global_batch_size = batch_size * world_size
    dataset = make_rows(num_rows)

    def sampler(rank: int) -> TokenSampler:
        order = RowOrder(batch_size=batch_size, world_size=world_size, rank=rank, seed=3)
        return TokenSampler(dataset, order)

    if num_rows < global_batch_size:
        with pytest.raises(ValueError, match=f"needs {global_batch_size} rows"):
            sampler(0)
        return
    shares = []
    for rank in range(world_size):
        of_rank = sampler(rank)
        of_rank.set_epoch(epoch)
        shares.append(list(of_rank))
        assert len(of_rank) == len(shares[-1])
    num_used = num_rows // global_batch_size * global_batch_size
    head = shuffled_rows(num_rows, seed=3, epoch=epoch)[:num_used].tolist()
    assert [row for turn in zip(*shares, strict=True) for row in turn] == head
    assert len(set(head)) == num_used


def test_seed_and_epoch_each_give_another_order_and_are_not_interchangeable() -> None:
    orders = {
        tuple(shuffled_rows(20, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_the_order_of_a_seed_never_changes_exactly() -> None:
    # Written down once: a checkpoint of today must resume in the same order tomorrow.
    assert shuffled_rows(8, seed=1, epoch=2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]


def test_without_shuffling_every_epoch_has_the_order_of_the_text() -> None:
    loader = make_loader(5, shuffle=False)
    loader.sampler.set_epoch(3)
    assert rows_of(loader) == [[0, 1], [2, 3]]


def test_workers_change_nothing_in_the_order() -> None:
    assert rows_of(make_loader(num_workers=2)) == rows_of(make_loader(num_workers=0))


def test_an_iterator_takes_the_epoch_at_its_first_batch() -> None:
    loader, other = make_loader(num_workers=1), make_loader()
    iterator = iter(loader)
    for each in (loader, other):
        each.sampler.set_epoch(4)
    assert (next(iterator).ids_BS[:, 0] // 3).tolist() == rows_of(other)[0]


def test_loading_leaves_the_global_random_stream_alone() -> None:
    before = torch.get_rng_state()
    rows_of(make_loader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_done", range(6))
def test_a_loaded_state_goes_on_and_does_not_read_what_was_done(num_done: int) -> None:
    first = make_loader()
    first.sampler.set_epoch(1)
    batches = iter(first)
    for _ in range(num_done):
        next(batches)
    state = first.state_dict()
    assert state["num_batches_done"] == num_done

    second = make_loader()
    second.load_state_dict(state)
    assert second.state_dict() == state
    other = make_loader()
    other.sampler.set_epoch(1)
    expected = rows_of(other)[num_done:]
    if num_done == 5:  # the epoch is over: on with the next one
        other.sampler.set_epoch(2)
        expected = rows_of(other)
    assert rows_of(second) == expected
    assert second.dataset.read == [row for batch in expected for row in batch]
    assert len(second) == 5


def test_a_state_counts_batches_handed_out_and_not_those_read_ahead() -> None:
    loader = make_loader(num_workers=2)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["num_batches_done"] == 1


def test_a_second_epoch_starts_at_its_beginning() -> None:
    loader = make_loader()
    loader.load_state_dict(make_loader().state_dict() | {"num_batches_done": 2})
    assert len(rows_of(loader)) == 3
    loader.sampler.set_epoch(1)
    assert len(rows_of(loader)) == 5


def test_a_state_is_the_same_on_every_rank() -> None:
    states = [make_loader(world_size=2, rank=rank).state_dict() for rank in range(2)]
    assert states[0] == states[1]


def test_a_state_goes_on_at_another_number_of_ranks_if_the_global_batch_is_the_same() -> None:
    wide = make_loader(13, batch_size=4)
    batches = iter(wide)
    next(batches)
    expected = [sorted((batch.ids_BS[:, 0] // 3).tolist()) for batch in batches]
    state = wide.state_dict() | {"num_batches_done": 1}
    ranks = [make_loader(13, batch_size=2, world_size=2, rank=rank) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    joined = zip(*map(rows_of, ranks), strict=True)
    assert [sorted(a + b) for a, b in joined] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "written with data.seed=5, this run has 6; run with 5"),
        ({"shuffle": False}, "written with data.shuffle=True, this run has False"),
        ({"batch_size": 3}, "written with data.batch_size times ranks=2, this run has 3"),
        ({"world_size": 2}, "written with data.batch_size times ranks=2, this run has 4"),
        ({"num_rows": 12}, "written with number of training rows=11, this run has 12"),
    ],
)
def test_a_state_of_another_order_is_refused(change: dict[str, int], message: str) -> None:
    state = make_loader().state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        make_loader(**change).load_state_dict(state)


def test_a_state_of_another_sequence_length_is_refused() -> None:
    state = make_loader().state_dict() | {"sequence_length": 7}
    with pytest.raises(ValueError, match=r"written with data.sequence_length=7, this run has 3"):
        make_loader().load_state_dict(state)


def test_at_the_end_of_an_epoch_the_batch_size_may_change() -> None:
    loader = make_loader(batch_size=3)
    loader.load_state_dict(make_loader().state_dict() | {"num_batches_done": 5})
    loader.sampler.set_epoch(1)
    assert len(rows_of(loader)) == 3


def test_a_limit_of_the_trainer_ends_the_epoch_of_a_state() -> None:
    def limited(limit: float) -> ResumableDataLoader:
        return ResumableDataLoader(make_rows(11), RowOrder(batch_size=2), limit_batches=limit)

    assert limited(2).state_dict()["num_batches"] == 2
    assert limited(99).state_dict()["num_batches"] == 5
    assert limited(0.5).state_dict()["num_batches"] == 2
    assert limited(1.0).state_dict()["num_batches"] == 5


def test_rows_that_cannot_be_dealt_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 rows can't be dealt to 2 ranks without drop_last"):
        make_loader(5, world_size=2, drop_last=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_gives_ranks_equal_batches_and_every_token_once(world_size: int) -> None:
    tokens = np.arange(23, dtype=np.uint16)
    rows = WindowDataset(TokenStream([tokens]), 3, eos_id=99, keep_partial=True)
    lengths, labels = [], []
    for rank in range(world_size):
        order = RowOrder(
            batch_size=2, world_size=world_size, rank=rank, shuffle=False, drop_last=False
        )
        batches = list(ResumableDataLoader(rows.padded_to_multiple_of(world_size), order))
        lengths.append([len(batch.ids_BS) for batch in batches])
        labels += [batch.labels_BS.flatten() for batch in batches]
    assert all(length == lengths[0] for length in lengths)
    predicted = torch.cat(labels)
    assert sorted(predicted[predicted != IGNORE_INDEX].tolist()) == list(range(1, 23))


def test_lightning_can_build_the_loader_again_unshuffled() -> None:
    rows = make_rows(5)
    sampler = SequentialSampler(rows)
    loader = ResumableDataLoader(rows, RowOrder(batch_size=2), sampler=sampler, shuffle=False)
    assert rows_of(loader) == [[0, 1], [2, 3]]


def test_another_sampler_is_refused() -> None:
    rows = make_rows(5)
    with pytest.raises(TypeError, match="can't take sampler=RandomSampler"):
        ResumableDataLoader(rows, RowOrder(batch_size=2), sampler=RandomSampler(rows))
