"""What named ranges cost without a profiler: `python -m tests.peers.range_cost`.

Forward and backward of a model with small experts on few tokens, where ranges weigh most, with the package's ranges,
without any, and with torch's own context manager in every place; in interleaved rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from lightning_moe import AttentionConfig, MoEConfig, RouterConfig, TransformerConfig
from lightning_moe.nn import MoETransformer, block, moe
from lightning_moe.ops import ranges
from tests.peers.rounds import describe_machine, describe_rounds, median_and_range, take_turns

_OFF: Final = nullcontext()
WAYS: Final[dict[str, Callable[[str], AbstractContextManager[Any]]]] = {
    "none": lambda name: _OFF,
    "named_range": ranges.named_range,
    "record_function": torch.profiler.record_function,
}


@contextmanager
def ranges_by(way: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Use `way` for all ranges of a forward."""
    before = block.named_range
    block.named_range = moe.named_range = way
    try:
        yield
    finally:
        block.named_range = moe.named_range = before


def model(num_layers: int) -> MoETransformer:
    """Layers that take as little time as a layer can."""
    torch.manual_seed(0)
    return MoETransformer(
        TransformerConfig(
            vocab_size=64,
            d_model=64,
            num_layers=num_layers,
            attention=AttentionConfig(num_heads=2),
            moe=MoEConfig(num_experts=4, hidden_size=32, router=RouterConfig(top_k=1)),
        )
    )


def seconds(layers: MoETransformer, ids_BS: torch.Tensor, way: str, repeats: int) -> float:
    """Time of some forwards and backwards."""
    with ranges_by(WAYS[way]):
        started = time.perf_counter()
        for _ in range(repeats):
            layers(ids_BS)[0].sum().backward()
        return time.perf_counter() - started


def nanoseconds(way: str, repeats: int = 20_000) -> float:
    """Time of one range around nothing."""
    range_by = WAYS[way]
    started = time.perf_counter()
    for _ in range(repeats):
        with range_by("empty"):
            pass
    return (time.perf_counter() - started) / repeats * 1e9


def table(num_rounds: int, repeats: int, num_layers: int) -> Table:
    """Of all ways."""
    torch.set_num_threads(1)
    layers = model(num_layers)
    ids_BS = torch.zeros(1, 32, dtype=torch.int64)
    seconds(layers, ids_BS, "none", 1)
    times = take_turns(
        WAYS, lambda way: seconds(layers, ids_BS, way, repeats), num_rounds=num_rounds
    )
    made = Table(
        title=f"{num_layers} layers, 32 tokens, {describe_rounds(num_rounds)}",
        caption=describe_machine(1),
    )
    for name in ("ranges", "one range, ns", "forward + backward over none", "range of rounds"):
        made.add_column(name)
    for way in WAYS:
        ratio, spread = median_and_range(times[way], times["none"], digits=3)
        made.add_row(way, f"{nanoseconds(way):.0f}", ratio, spread)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    Console(width=100).print(table(options.rounds, options.repeats, options.layers))


if __name__ == "__main__":
    main()
