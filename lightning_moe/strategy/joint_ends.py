"""Ranks that begin and end stages together: through loaders of unequal length, and signals to stop."""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_moe.ops.read_back import ReadBack, numbers_on
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.strategy.stop_signal import StopRequest


class JointEnds:
    """What keeps ranks together that need each other in every step. A single rank needs none of it.

    Args:
        world: all ranks.
        device: for messages between them.

    Attributes:
        stop: the signal that this rank has received.
        stopped_by: the signal that all ranks have agreed to stop at; 0 for none.
    """

    def __init__(self, world: AxisGroup, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._left_to_predict: list[tuple[int, int]] = []
        self.stop = StopRequest()
        self.stopped_by = 0
        self._asked_to_stop: ReadBack | None = None

    def loader(self, loader: object) -> object:
        """The loader; one of unknown length ends on all ranks as soon as it ends on one."""
        if self._world.size == 1 or is_sized(loader):
            return loader
        assert isinstance(loader, Iterable)
        return _EndTogether(loader, self)

    def refuse_uneven(self, num_batches: int | float | Sequence[int | float], what: str) -> None:
        """Ranks that run out of batches early would leave the others waiting for their tokens.

        Args:
            num_batches: of this rank, of the one data loader or of each; infinite where unknown.
            what: stage, for the error.

        Raises:
            RuntimeError: on every rank, if the ranks' numbers differ.
        """
        if self._world.size == 1:
            return
        for i, number in enumerate(
            num_batches if isinstance(num_batches, Sequence) else [num_batches]
        ):
            largest, smallest = self._largest_and_smallest(number)
            if largest != smallest:
                raise RuntimeError(
                    f"{what} data loader {i} has {smallest:.0f} batches on one rank and {largest:.0f} on another; "
                    "experts on several ranks need all of them in every step: use a distributed sampler that pads or "
                    f"drops, or limit_{what}_batches={smallest:.0f}"
                )

    def begin_predict(self, num_batches: Sequence[int | float]) -> None:
        """Find out how many batches each rank has of each loader: Lightning's sampler leaves some ranks with fewer.

        Raises:
            RuntimeError: on every rank, if one of them has none of a loader.
        """
        self._left_to_predict = []
        if self._world.size == 1:
            return
        for number in num_batches:
            largest, smallest = self._largest_and_smallest(number)
            if largest and not smallest:
                raise RuntimeError(
                    f"predict gives {largest:.0f} batches to one rank and none to another; use fewer ranks, smaller "
                    "batches or more samples"
                )
            if number:
                self._left_to_predict.append((int(_finite(number)), int(largest)))

    def num_repeats(self) -> int:
        """How often this rank is to repeat the batch that it has just predicted, for ranks that have more batches."""
        if not self._left_to_predict:
            return 0
        # Loaders come one after the other; a user's step need not take the batch's number, so count.
        own, largest = self._left_to_predict[0]
        self._left_to_predict[0] = (own - 1, largest - 1)
        if own > 1:
            return 0
        del self._left_to_predict[0]
        return largest - 1

    def ask_to_stop(self) -> None:
        """Begin to ask whether any rank was told to stop; all ranks call it."""
        self._asked_to_stop = self._ask(self.stop.received)

    def agreed_to_stop(self) -> bool:
        """Whether any rank had been told to stop when all were asked; waits for no device that is past that."""
        if self._asked_to_stop is not None:
            self.stopped_by = int(self._asked_to_stop.values()[0])
            self._asked_to_stop = None
        return bool(self.stopped_by)

    def _largest_and_smallest(self, value: int | float) -> tuple[float, float]:
        """Maximum and minimum over all ranks."""
        largest, negated_smallest = self._ask(value).values().tolist()
        return largest, -negated_smallest

    def _ask(self, value: int | float) -> ReadBack:
        """Maximum over all ranks of the value, and of its negative."""
        value = _finite(value)
        alone = self._world.size == 1
        pair = numbers_on(torch.device("cpu") if alone else self._device, (value, -value))
        self._world.all_reduce(pair, "max")
        return ReadBack(pair)

    def all_have(self, one_more: bool) -> bool:
        """Whether all ranks have one more batch; all ranks call it."""
        largest, smallest = self._largest_and_smallest(int(one_more))
        if largest != smallest:
            rank_zero_warn(
                "a data loader ended on one rank before the others: all ranks end it here"
            )
        return bool(smallest)


class _EndTogether:
    """A loader that ends on all ranks at once. Everything but iteration is the loader's own."""

    def __init__(self, loader: Iterable[Any], ends: JointEnds) -> None:
        self._loader = loader
        self._ends = ends

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        own = iter(self._loader)
        missing = object()
        while self._ends.all_have((batch := next(own, missing)) is not missing):
            yield batch


def _finite(number: int | float) -> float:
    """The number, or a very large one that integers and messages can hold."""
    return min(float(number), 1e18)


def is_sized(loader: object) -> bool:
    """Whether the number of batches is known before iteration."""
    try:
        return isinstance(loader, Sized) and math.isfinite(len(loader))
    except (TypeError, NotImplementedError):  # how loaders of iterable data say that it isn't known
        return False
