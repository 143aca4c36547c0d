"""A loader whose order is known in advance, so that it can go on from the middle of an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from lightning_moe.data.batch import TokenBatch, TokenRow, collate
from lightning_moe.data.packing import WindowDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrder:
    """How rows are dealt to ranks and batches.

    Attributes:
        batch_size: rows per rank and batch.
        world_size: number of ranks.
        rank: this rank.
        shuffle: whether rows come in a new random order in every epoch.
        seed: of that order.
        drop_last: drops rows at the end of the order, so that every rank has full batches only.
    """

    batch_size: int
    world_size: int = 1
    rank: int = 0
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True


def shuffled_rows(num_rows: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """All row numbers in a random order that seed and epoch fix.

    Sorts raw output of PCG64, which numpy promises never to change (unlike its shuffles).
    """
    keys = np.random.PCG64([seed, epoch]).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


class TokenSampler(DistributedSampler[int]):
    """Row numbers of one rank: a function of the order's options and the epoch only.

    The ranks take turns in one common order, so the rows of a global batch do not depend on how it
    is divided among ranks. It is a `DistributedSampler`, which Lightning leaves in place.

    Args:
        dataset: the rows, the same on all ranks.
        order: how they are dealt.

    Raises:
        ValueError: if there are too few rows for one batch, or they can't be dealt out evenly.
    """

    def __init__(self, dataset: WindowDataset, order: RowOrder) -> None:
        super().__init__(
            dataset,
            num_replicas=order.world_size,
            rank=order.rank,
            shuffle=order.shuffle,
            seed=order.seed,
            drop_last=order.drop_last,
        )
        self.order = order
        self.num_rows = len(dataset)
        self.epoch_shift = 0
        self.num_rows_to_skip = 0
        self.num_samples = _rows_per_rank(self.num_rows, order)
        self.total_size = self.num_samples * order.world_size

    def __iter__(self) -> Iterator[int]:
        """Row numbers of this rank in epoch `epoch + epoch_shift`, without `num_rows_to_skip`."""
        if self.order.shuffle:
            epoch = self.epoch + self.epoch_shift
            rows = shuffled_rows(self.num_rows, seed=self.order.seed, epoch=epoch)
        else:
            rows = np.arange(self.num_rows)
        mine = rows[self.order.rank : self.total_size : self.order.world_size]
        return map(int, mine[self.num_rows_to_skip :])


def _rows_per_rank(num_rows: int, order: RowOrder) -> int:
    global_batch_size = order.world_size * order.batch_size
    if order.drop_last:
        num_batches = num_rows // global_batch_size
        if num_batches == 0:
            raise ValueError(
                f"data.batch_size={order.batch_size} on {order.world_size} ranks needs "
                f"{global_batch_size} rows of data.sequence_length tokens, but the training split "
                f"has {num_rows}; lower one of the two, or give more text"
            )
        return num_batches * order.batch_size
    if num_rows % order.world_size:
        raise ValueError(
            f"{num_rows} rows can't be dealt to {order.world_size} ranks without drop_last; "
            f"use WindowDataset.padded_to_multiple_of({order.world_size})"
        )
    return num_rows // order.world_size


class LoaderState(TypedDict):
    """The position of a loader, in plain values that are equal on every rank."""

    epoch: int
    num_batches_done: int
    num_batches: int
    global_batch_size: int
    sequence_length: int
    num_rows: int
    shuffle: bool
    seed: int


_OPTIONS: Final = {
    "seed": "data.seed",
    "shuffle": "data.shuffle",
    "global_batch_size": "data.batch_size times ranks",
    "sequence_length": "data.sequence_length",
    "num_rows": "number of training rows",
}


class ResumableDataLoader(DataLoader[TokenRow]):
    """A DataLoader with a position, counted in batches handed out (not in batches read ahead).

    Lightning saves `state_dict()` of the training loader in a checkpoint and gives it back on
    resume; the loader then goes on with the next batch and never reads the ones before.

    Two habits of Lightning 2.6 shape it. It calls `iter` before it tells the sampler the epoch, so
    an iterator starts its work at the first `next`: workers would begin with rows of another epoch.
    And when it resumes a run that `max_steps` limits at the end of an epoch, it counts that epoch
    twice; so after a resume the state, not the Trainer, says which epoch comes.

    Args:
        dataset: the rows.
        order: how they are dealt to ranks and batches.
        num_workers: processes that read ahead; the order does not depend on it.
        pin_memory: whether batches come in page-locked memory.
        limit_batches: the Trainer's `limit_train_batches`, which ends an epoch early: a number of
            batches, or a share of them.
        shuffle: False turns the order's shuffling off. Lightning passes this and the two below
            when it builds the loader again, unshuffled, for `Trainer(overfit_batches=...)`.
        sampler: a SequentialSampler, which says the same, or None.
        batch_sampler: None.

    Raises:
        TypeError: if another sampler is given; the position would mean nothing with it.
    """

    sampler: TokenSampler

    def __init__(  # noqa: PLR0913 - three of these are Lightning's
        self,
        dataset: WindowDataset,
        order: RowOrder,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        limit_batches: int | float = 1.0,
        shuffle: bool | None = None,
        sampler: Sampler[int] | None = None,
        batch_sampler: None = None,
    ) -> None:
        if sampler is not None and not isinstance(sampler, SequentialSampler):
            raise TypeError(
                f"ResumableDataLoader makes its own order and can't take "
                f"sampler={type(sampler).__name__}; use torch's DataLoader with it"
            )
        if shuffle is False or sampler is not None:
            order = replace(order, shuffle=False)
        super().__init__(
            dataset,
            batch_size=order.batch_size,
            sampler=TokenSampler(dataset, order),
            drop_last=order.drop_last,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=collate,
            # Starting an iterator draws a number. Without a generator of its own the loader would
            # draw it from torch's global stream, and a resumed run would see other dropout masks.
            generator=torch.Generator().manual_seed(order.seed),
        )
        self._sequence_length = dataset.sequence_length
        self._batches_per_epoch = _limited(len(self), limit_batches)
        # Epoch and batches done in it; None before the first batch is asked for.
        self._place: tuple[int, int] | None = None
        self._is_resuming = False

    def __iter__(self) -> Iterator[TokenBatch]:  # type: ignore[override]  # torch names a class of its own
        """The batches of the sampler's epoch, or from where a loaded state left off."""
        epoch, num_done = self._first_place()
        self._is_resuming = False
        self.sampler.epoch_shift = epoch - self.sampler.epoch
        self.sampler.num_rows_to_skip = num_done * self.sampler.order.batch_size
        self._place = (epoch, num_done)
        for batch in super().__iter__():
            num_done += 1
            self._place = (epoch, num_done)
            yield batch

    def _first_place(self) -> tuple[int, int]:
        if not self._is_resuming or self._place is None:
            return self.sampler.epoch + self.sampler.epoch_shift, 0
        epoch, num_done = self._place
        return (epoch + 1, 0) if num_done >= self._batches_per_epoch else (epoch, num_done)

    def state_dict(self) -> LoaderState:
        """The epoch, the batches handed out in it, and what the order depends on."""
        order = self.sampler.order
        epoch, num_done = self._place or (self.sampler.epoch, 0)
        return LoaderState(
            epoch=epoch,
            num_batches_done=num_done,
            num_batches=self._batches_per_epoch,
            global_batch_size=order.batch_size * order.world_size,
            sequence_length=self._sequence_length,
            num_rows=self.sampler.num_rows,
            shuffle=order.shuffle,
            seed=order.seed,
        )

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Go on from a state.

        The number of ranks may change if the batch size makes up for it: the rows of a global batch
        stay the same. At the end of its epoch a state fits any loader, as no row is left to read.

        Raises:
            ValueError: if the state belongs to another order of rows.
        """
        epoch, num_done = state_dict["epoch"], state_dict["num_batches_done"]
        if num_done >= state_dict["num_batches"]:
            num_done = self._batches_per_epoch
        else:
            self._check_same_order(state_dict)
        self.sampler.set_epoch(epoch)
        self._place = (epoch, num_done)
        self._is_resuming = True

    def _check_same_order(self, state_dict: LoaderState) -> None:
        own = self.state_dict()
        for key, option in _OPTIONS.items():
            saved, here = state_dict.get(key), own.get(key)
            if saved != here:
                raise ValueError(
                    f"can't go on in the middle of epoch {state_dict['epoch']}: the checkpoint was "
                    f"written with {option}={saved}, this run has {here}; run with {saved}, or "
                    f"resume from a checkpoint that was written at the end of an epoch"
                )


def _limited(num_batches: int, limit: int | float) -> int:
    """Batches of an epoch as the Trainer counts them: an int is a number, a float a share."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
