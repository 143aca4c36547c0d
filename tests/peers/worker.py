"""A process that holds one contestant at a time and measures it when asked.

Processes, because an allocator setting holds for a whole process and can't be undone.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, Self

import numpy as np
import torch

from lightning_moe.cli.process import keep_freed_memory
from tests.parity import hf
from tests.peers.contestants import Contestant, Kind, Shape, Work, build

Allocator = Literal["kept", "default"]
Clock = Literal["wall", "cpu"]

MIN_SECONDS: Final = 0.2
# A process's CPU time leaves out what others take; with several threads it also counts their waiting.
CLOCKS: Final[dict[Clock, Callable[[], float]]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Who runs in a worker: the kind of layer, whose routing it has, and what becomes of freed memory."""

    kind: Kind
    family: hf.Family
    allocator: Allocator


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What must be equal before two times may be compared, and how the router spread the tokens."""

    inputs_hash: str
    weights_hash: str
    y: np.ndarray
    grad_x: np.ndarray
    load_max_over_mean: float | None


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, entry: Entry, *, num_threads: int, clock: Clock = "wall") -> None:
        # Forked from a server that has torch and transformers imported already, but has run nothing yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, entry, num_threads, clock), daemon=True
        )
        self._process.start()
        theirs.close()

    def prepare(self, shape: Shape) -> Facts:
        """Build the contestant in this shape and run it once."""
        return self._ask(shape)

    def seconds(self, work: Work) -> float:
        """Mean over a few times, after one that is not counted."""
        return self._ask(work)

    def _ask(self, request: Shape | Work) -> Any:
        self._connection.send(request)
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"a worker ended with exit code {self._process.exitcode}; its error stands above"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, entry: Entry, num_threads: int, clock: Clock) -> None:
    if entry.allocator == "kept" and not keep_freed_memory():
        raise RuntimeError(
            "this C library can't keep freed memory, so equal allocators can't be set here"
        )
    torch.set_num_threads(num_threads)
    contestant: Contestant | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, Shape):
            contestant = build(entry.kind, entry.family, request)
            connection.send(_facts(contestant))
        else:
            assert contestant is not None
            connection.send(_measure(contestant, request, CLOCKS[clock]))


def _facts(contestant: Contestant) -> Facts:
    y = contestant.step()
    assert contestant.x.grad is not None
    return Facts(
        inputs_hash=contestant.inputs_hash,
        weights_hash=contestant.weights_hash,
        y=y.detach().numpy(),
        grad_x=contestant.x.grad.numpy(),
        load_max_over_mean=contestant.load_max_over_mean,
    )


def _measure(contestant: Contestant, work: Work, now: Callable[[], float]) -> float:
    contestant.forget_gradients()
    contestant.do(work)
    seconds, steps = 0.0, 0
    while seconds < MIN_SECONDS:
        contestant.forget_gradients()
        start = now()
        contestant.do(work)
        seconds += now() - start
        steps += 1
    return seconds / steps
