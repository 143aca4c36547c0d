"""How fast our layer is next to those of transformers: `python -m tests.peers.speed`.

Forward alone, forward and backward, and a whole training step with AdamW, of a layer in float32 on the CPU. All
contestants of a shape have the same weights and tokens and must give the same output and gradient; otherwise there is
no ratio. Each is a process of its own, and they take turns: a ratio compares neighbours in time, and the median is over
rounds.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
import transformers
from rich.console import Console
from rich.table import Table

from tests.parity import hf
from tests.peers.contestants import Shape, Work
from tests.peers.rounds import ENOUGH_ROUNDS, describe_machine, describe_rounds, quieten, take_turns
from tests.peers.worker import CLOCKS, Clock, Entry, Facts, Worker

# Float32 sums in another order; a token that went to another expert would differ by far more.
TOLERANCE: Final = 1e-4
ROUTING: Final = "learned router, random weights"
TITLES: Final[dict[hf.Family, str]] = {"olmoe": "OLMoE", "qwen3_moe": "Qwen3-MoE"}


def _shape(tokens: int, width: int, hidden: int, experts: int, top_k: int) -> Shape:
    sizes = hf.Sizes(d_model=width, hidden_size=hidden, num_experts=experts, top_k=top_k)
    return Shape(num_tokens=tokens, layer=sizes)


SHAPES: Final = {
    "full": (
        _shape(1024, 256, 128, 32, 4),
        _shape(8192, 256, 256, 8, 4),
        _shape(8192, 256, 256, 128, 4),
        _shape(4096, 512, 512, 32, 4),
    ),
    "small": (_shape(96, 32, 16, 8, 2),),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two entries of the race, ours first."""

    title: str
    ours: Entry
    other: Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        ratio, lowest, highest: other time / our time: median and range over the rounds.
        our_ms, other_ms: medians over the rounds.
        difference: largest of output and input gradient, relative to the largest entry; None where weights differ by
            nature.
    """

    shape: str
    work: Work
    routing: str
    load_max_over_mean: float
    comparison: str
    ratio: float
    lowest: float
    highest: float
    our_ms: float
    other_ms: float
    difference: float | None
    inputs_hash: str
    weights_hash: str


def comparisons() -> list[Comparison]:
    """Against each block with equal allocators and as each is used by default, and against a dense layer."""
    rows = []
    for family, title in TITLES.items():
        ours = Entry(kind="ours", family=family, allocator="kept")
        for allocator, how in (("kept", "freed memory kept by both"), ("default", "defaults")):
            other = Entry(kind="theirs", family=family, allocator=allocator)
            rows.append(Comparison(title=f"{title} grouped_mm, {how}", ours=ours, other=other))
    dense = Entry(kind="dense", family="olmoe", allocator="kept")
    ours = Entry(kind="ours", family="olmoe", allocator="kept")
    return [*rows, Comparison(title="dense SwiGLU of K * F", ours=ours, other=dense)]


def race(
    shapes: Sequence[Shape], *, num_rounds: int, num_threads: int, clock: Clock = "wall"
) -> list[Row]:
    """Measure every comparison in every shape.

    Raises:
        RuntimeError: if weights, inputs or results of two contestants differ.
    """
    pairs = comparisons()
    entries = dict.fromkeys(entry for pair in pairs for entry in (pair.ours, pair.other))
    rows = []
    with ExitStack() as stack:
        workers = {
            entry: stack.enter_context(Worker(entry, num_threads=num_threads, clock=clock))
            for entry in entries
        }
        for shape in shapes:
            facts = {entry: worker.prepare(shape) for entry, worker in workers.items()}
            differences = [difference(pair, facts[pair.ours], facts[pair.other]) for pair in pairs]
            for work in get_args(Work):
                seconds = take_turns(
                    workers,
                    lambda entry, work=work: workers[entry].seconds(work),
                    num_rounds=num_rounds,
                )
                rows += [
                    _row(shape, work, pair, facts[pair.ours], seconds, apart)
                    for pair, apart in zip(pairs, differences, strict=True)
                ]
    return rows


def difference(pair: Comparison, ours: Facts, other: Facts) -> float | None:
    """How far the results of two contestants lie apart; None for a dense layer, which computes something else.

    Raises:
        RuntimeError: if their inputs, weights or results differ, so that times would mean nothing.
    """
    if ours.inputs_hash != other.inputs_hash:
        raise RuntimeError(f"no ratio against {pair.title}: the inputs differ")
    if pair.other.kind == "dense":
        return None
    if ours.weights_hash != other.weights_hash:
        raise RuntimeError(f"no ratio against {pair.title}: the weights differ")
    # numpy's maximum hands a NaN on; Python's may not.
    apart = float(np.maximum(_relative(ours.y, other.y), _relative(ours.grad_x, other.grad_x)))
    if not apart <= TOLERANCE:
        raise RuntimeError(f"no ratio against {pair.title}: the results differ by {apart:.1e}")
    return apart


def _relative(ours: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(ours - other).max() / np.abs(other).max())


def _row(
    shape: Shape,
    work: Work,
    pair: Comparison,
    facts: Facts,
    seconds: dict[Entry, list[float]],
    apart: float | None,
) -> Row:
    ours, other = seconds[pair.ours], seconds[pair.other]
    ratios = [theirs / mine for mine, theirs in zip(ours, other, strict=True)]
    assert facts.load_max_over_mean is not None
    return Row(
        shape=str(shape),
        work=work,
        routing=ROUTING,
        load_max_over_mean=facts.load_max_over_mean,
        comparison=pair.title,
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        our_ms=statistics.median(ours) * 1e3,
        other_ms=statistics.median(other) * 1e3,
        difference=apart,
        inputs_hash=facts.inputs_hash,
        weights_hash=facts.weights_hash if apart is not None else "",
    )


def table(rows: Sequence[Row], *, num_rounds: int, num_threads: int, clock: Clock) -> Table:
    """The rows for people; a ratio above 1 says that ours is faster."""
    title = f"MoE layer, float32, {clock} time, median and range of {describe_rounds(num_rounds)}"
    caption = (
        f"{describe_machine(num_threads)}, transformers {transformers.__version__}; routing: {ROUTING}. "
        "defaults: ours keeps freed memory, theirs doesn't. Routing records included in ours."
    )
    result = Table(title=title, caption=caption)
    for name in ("shape", "load max/mean", "work", "against", "other / ours", "range", "ours ms"):
        result.add_column(name)
    for name in ("other ms", "apart", "inputs", "weights"):
        result.add_column(name)
    previous = None
    for row in rows:
        if previous not in (None, (row.shape, row.work)):
            result.add_section()
        previous = row.shape, row.work
        result.add_row(
            row.shape,
            f"{row.load_max_over_mean:.2f}",
            row.work,
            row.comparison,
            f"{row.ratio:.2f}",
            f"{row.lowest:.2f} - {row.highest:.2f}",
            f"{row.our_ms:.1f}",
            f"{row.other_ms:.1f}",
            "-" if row.difference is None else f"{row.difference:.0e}",
            row.inputs_hash,
            row.weights_hash or "own",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the race and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ENOUGH_ROUNDS)
    parser.add_argument("--shapes", choices=SHAPES, default="full")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a busy machine")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    how = {
        "num_rounds": options.rounds,
        "num_threads": options.threads,
        "clock": options.clock,
    }
    rows = race(SHAPES[options.shapes], **how)
    console = Console()
    console.width = max(console.width, 190)
    console.print(table(rows, **how))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    quieten()
    main()
