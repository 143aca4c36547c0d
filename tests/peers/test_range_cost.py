"""The measurement of named ranges runs and compares all ways. No time is checked."""

import io

from rich.console import Console

from lightning_moe.nn import block, moe
from lightning_moe.ops.ranges import named_range
from tests.peers.range_cost import WAYS, ranges_by, table


def test_the_table_has_a_line_for_every_way() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(num_rounds=1, repeats=1, num_layers=1))
    printed = console.file.getvalue()
    assert all(way in printed for way in WAYS)
    assert "too few to quote" in printed


def test_ways_are_exchanged_in_every_place_and_put_back() -> None:
    with ranges_by(WAYS["none"]):
        assert block.named_range is moe.named_range is WAYS["none"]
    assert block.named_range is moe.named_range is named_range
