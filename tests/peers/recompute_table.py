"""What each way of recomputing costs and saves: `python -m tests.peers.recompute_table`.

One forward and backward of a small transformer on the CPU. All ways have the same weights and tokens and must give
the same loss; they take turns, and a ratio compares neighbours in time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_moe.cli.process import keep_freed_memory
from lightning_moe.config import Recompute
from lightning_moe.nn import MoETransformer
from tests.kit.memory import LiveBytes, kept_bytes
from tests.peers import small_models
from tests.peers.rounds import (
    ENOUGH_ROUNDS,
    describe_machine,
    describe_rounds,
    median_and_range,
    quieten,
    take_turns,
)
from tests.peers.small_models import VOCABULARY, Size

WAYS: Final = ("none", "attention", "moe", "block")
MIB: Final = 2**20
# Twice as long as where only experts are compared: attention counts as well.
SIZES: Final = {
    name: replace(size, length=2 * size.length) for name, size in small_models.SIZES.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way.

    Attributes:
        milliseconds: of every round.
        kept: bytes kept for backward, weights not counted.
        peak: most bytes of tensors at once in a step, beyond weights and their gradients.
        loss: of one step.
    """

    way: str
    milliseconds: list[float]
    kept: int
    peak: int
    loss: float


def measure(size: Size, *, num_rounds: int) -> list[Row]:
    """All ways, taking turns.

    Raises:
        RuntimeError: if two ways differ in their loss, so that times would mean nothing.
    """
    shape = (size.rows, size.length)
    ids = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    models = {way: _model(size, way) for way in WAYS}
    losses = {way: float(_step(model, ids)) for way, model in models.items()}
    if len(set(losses.values())) > 1:
        raise RuntimeError(f"the ways differ in their loss: {losses}")

    def milliseconds_of(way: Recompute) -> float:
        start = time.perf_counter()
        _step(models[way], ids)
        return (time.perf_counter() - start) * 1e3

    milliseconds = take_turns(WAYS, milliseconds_of, num_rounds=num_rounds)
    return [
        Row(
            way=way,
            milliseconds=milliseconds[way],
            kept=kept_bytes(lambda model=model: model.features(ids), without=model.parameters()),
            peak=_peak(model, ids),
            loss=losses[way],
        )
        for way, model in models.items()
    ]


def _model(size: Size, way: Recompute) -> MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(size.config(recompute=way))


def _step(model: MoETransformer, ids: Tensor) -> Tensor:
    hidden, _ = model.features(ids)
    loss = hidden.square().mean()
    loss.backward()
    return loss.detach()


def _peak(model: MoETransformer, ids: Tensor) -> int:
    """With gradients in place already, as in every micro-batch but a step's first."""
    with LiveBytes() as memory:
        _step(model, ids)
    return memory.peak


def table(rows: Sequence[Row]) -> Table:
    """The rows for people; a ratio above 1 says slower, or more, than without recomputation."""
    rounds = describe_rounds(len(rows[0].milliseconds))
    result = Table(
        title=f"Recomputation: forward + backward, float32, {rounds}",
        caption=describe_machine(torch.get_num_threads()),
    )
    for name in ("recompute", "time / none", "range", "ms", "kept MiB", "peak MiB", "peak / none"):
        result.add_column(name)
    plain = rows[0]
    for row in rows:
        ratio, lowest_and_highest = median_and_range(row.milliseconds, plain.milliseconds)
        result.add_row(
            row.way,
            ratio,
            lowest_and_highest,
            f"{statistics.median(row.milliseconds):.1f}",
            f"{row.kept / MIB:.1f}",
            f"{row.peak / MIB:.1f}",
            f"{row.peak / plain.peak:.2f}",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ENOUGH_ROUNDS)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    console = Console()
    console.width = max(console.width, 120)
    console.print(table(measure(SIZES[options.size], num_rounds=options.rounds)))


if __name__ == "__main__":
    quieten()
    main()
