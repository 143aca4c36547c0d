"""Contestants that take turns, and what a table of their times says."""

import logging
import os
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, TypeVar

import torch

ENOUGH_ROUNDS: Final = 7
Name = TypeVar("Name", bound=Hashable)


def quieten() -> None:
    """Keep what Lightning and torchao tell of themselves out of a command's table."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)


def take_turns(
    names: Iterable[Name], time_of: Callable[[Name], float], *, num_rounds: int
) -> dict[Name, list[float]]:
    """The time of everyone in every round; every other round goes backwards."""
    order = list(names)
    times: dict[Name, list[float]] = {name: [] for name in order}
    for _ in range(num_rounds):
        for name in order:
            times[name].append(time_of(name))
        order.reverse()
    return times


def median_and_range(
    times: Sequence[float], base: Sequence[float], *, digits: int = 2
) -> tuple[str, str]:
    """Of the ratios of neighbours in time: above 1, slower than the base."""
    ratios = [own / other for own, other in zip(times, base, strict=True)]
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):.{digits}f}", f"{low:.{digits}f} - {high:.{digits}f}"


def describe_rounds(num_rounds: int) -> str:
    """For a title."""
    few = " (too few to quote)" if num_rounds < ENOUGH_ROUNDS else ""
    return f"{num_rounds} interleaved rounds{few}"


def describe_machine(num_threads: int) -> str:
    """For a caption."""
    return (
        f"torch {torch.__version__}, {num_threads} thread(s) on {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
