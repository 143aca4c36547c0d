"""What each way of recomputing costs and saves: `python -m tests.peers.recompute_table`.

One forward and backward of a small transformer on the CPU. All ways have the same weights and tokens and must give
the same loss; they take turns, and a ratio compares neighbours in time.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_moe.cli.memory import keep_freed_memory
from lightning_moe.config import AttentionConfig, MoEConfig, RouterConfig, TransformerConfig
from lightning_moe.nn import MoETransformer
from tests.memory import LiveBytes, kept_bytes

WAYS: Final = ("none", "attention", "moe", "block")
ENOUGH_ROUNDS: Final = 7
MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model and its batch."""

    d_model: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_layers: int
    batch: int
    length: int


SIZES: Final = {
    "full": Size(
        d_model=256, hidden_size=256, num_experts=32, top_k=4, num_layers=4, batch=4, length=512
    ),
    "small": Size(
        d_model=32, hidden_size=16, num_experts=8, top_k=2, num_layers=2, batch=2, length=32
    ),
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
    ids = torch.randint(256, (size.batch, size.length), generator=torch.Generator().manual_seed(0))
    models = {way: _model(size, way) for way in WAYS}
    losses = {way: float(_step(model, ids)) for way, model in models.items()}
    if len(set(losses.values())) > 1:
        raise RuntimeError(f"the ways differ in their loss: {losses}")
    milliseconds: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for _ in range(num_rounds):
        for way in order:
            start = time.perf_counter()
            _step(models[way], ids)
            milliseconds[way].append((time.perf_counter() - start) * 1e3)
        order.reverse()
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


def _model(size: Size, way: str) -> MoETransformer:
    torch.manual_seed(0)
    router = RouterConfig(top_k=size.top_k)
    moe = MoEConfig(num_experts=size.num_experts, hidden_size=size.hidden_size, router=router)
    return MoETransformer(
        TransformerConfig(
            vocab_size=256,
            d_model=size.d_model,
            num_layers=size.num_layers,
            attention=AttentionConfig(num_heads=4),
            moe=moe,
            recompute=way,  # type: ignore[arg-type]  # one of WAYS
        )
    )


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
    num_rounds = len(rows[0].milliseconds)
    title = f"Recomputation: forward + backward, float32, {num_rounds} interleaved rounds"
    if num_rounds < ENOUGH_ROUNDS:
        title += " (too few to quote)"
    result = Table(
        title=title,
        caption=f"torch {torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}",
    )
    for name in ("recompute", "time / none", "range", "ms", "kept MiB", "peak MiB", "peak / none"):
        result.add_column(name)
    plain = rows[0]
    for row in rows:
        ratios = [
            own / other for own, other in zip(row.milliseconds, plain.milliseconds, strict=True)
        ]
        result.add_row(
            row.way,
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
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
    main()
