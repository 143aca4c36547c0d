"""The table of recomputation runs and says what it compared. No time is checked."""

import io

from rich.console import Console

from tests.peers.recompute_table import SIZES, measure, table


def test_the_table_shows_less_kept_and_a_lower_peak_the_more_is_recomputed() -> None:
    rows = {row.way: row for row in measure(SIZES["small"], num_rounds=2)}
    assert list(rows) == ["none", "attention", "moe", "block"]
    assert rows["block"].kept < rows["moe"].kept < rows["attention"].kept < rows["none"].kept
    assert rows["block"].peak < min(rows["moe"].peak, rows["attention"].peak)
    assert max(rows["moe"].peak, rows["attention"].peak) < rows["none"].peak
    console = Console(file=io.StringIO(), width=120)
    console.print(table(list(rows.values())))
    printed = console.file.getvalue()
    assert "too few to quote" in printed
    assert "1.00 - 1.00" in printed
