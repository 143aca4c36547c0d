"""`lightning-moe routes-diff`: prints where the routes of two runs first differ, and why."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_moe.cli.errors import show_error

if TYPE_CHECKING:
    from lightning_moe.metrics.route_comparison import FirstDifference, RoutesDiff

DIFFERENT = 1
TROUBLE = 2


def run(arguments: Sequence[str]) -> int:
    """Compare; returns 0 if routes are equal, 1 if they differ, 2 after an error, as `diff` does."""
    options = _parser().parse_args(list(arguments))
    try:
        # They bring torch along, which `--help` should not wait for.
        from lightning_moe.metrics.route_comparison import compare, read_trace

        traces = read_trace(options.first), read_trace(options.second)
        difference = compare(*traces, tie=options.tie)
    except Exception as error:
        show_error(error)
        return TROUBLE
    _print(difference)
    return 0 if difference.is_equal else DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe routes-diff",
        description="Compare the routes that the callback RoutingTrace wrote in two runs. Exit code: 0 if they are "
        "equal, 1 if they differ, 2 after an error.",
        epilog="example: lightning-moe routes-diff runs/a runs/b",
        allow_abbrev=False,
    )
    for name, metavar in (("first", "A"), ("second", "B")):
        parser.add_argument(
            name, type=Path, metavar=metavar, help="a run folder, or one file of a rank"
        )
    parser.add_argument(
        "--tie",
        type=_margin,
        default=1e-4,
        metavar="MARGIN",
        help="margins up to this, in units of the selection score, count as near-ties (default 1e-4)",
    )
    return parser


def _margin(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be finite and at least 0")
    return value


def _print(difference: "RoutesDiff") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(difference))
    for name, keys in (("A", difference.only_first), ("B", difference.only_second)):
        if keys:
            more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
            console.print(f"only in {name}: {keys[0]}{more}")
    if difference.first is not None:
        for line in _first_lines(difference.first):
            console.print(line, markup=False)
    console.print(difference.conclusion(), style="bold")


def _table(difference: "RoutesDiff") -> object:
    from rich.table import Table

    table = Table(title="tokens that took other routes", title_justify="left")
    for name in ("layer", "tokens", "other experts", "near-ties", "other order", "largest margin"):
        table.add_column(name, justify="right")
    for layer in difference.layers:
        share = 100 * layer.num_other / max(layer.num_tokens, 1)
        table.add_row(
            str(layer.layer),
            f"{layer.num_tokens:,}",
            f"{layer.num_other:,} ({share:.3g} %)",
            f"{layer.num_near_ties:,}",
            f"{layer.num_reordered:,}",
            f"{layer.largest_margin:.3g}" if layer.num_other else "-",
        )
    return table


def _first_lines(first: "FirstDifference") -> list[str]:
    lines = [f"first difference: {first.key}, rank {first.rank}, token {first.token}"]
    for name, ids, weights, margin in zip(
        "AB", first.ids, first.weights, first.margins, strict=True
    ):
        shown = ", ".join(f"{weight:.4g}" for weight in weights)
        lines.append(f"  {name}: experts {ids}, weights {shown}, margin {margin:.3g}")
    return lines
