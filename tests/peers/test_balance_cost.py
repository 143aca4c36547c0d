"""The table of balance scopes runs and says what it compared. No time is checked."""

import io
from typing import get_args

from rich.console import Console

from lightning_moe.config import BalanceScope
from tests.kit.ranks import run_ranks
from tests.peers.balance_cost import SIZES, Run, measure, table


def test_every_scope_is_measured_and_compared_with_the_default() -> None:
    run = Run(size=SIZES["small"], num_rounds=1, num_steps=2, micro_batches=2, threads=1)
    measured = run_ranks(measure, 1, run, timeout_s=120)[0]
    assert {*measured} == {*get_args(BalanceScope), "micro_batch, no ExpertLoadMonitor"}
    assert all(len(of_variant.milliseconds) == 1 for of_variant in measured.values())
    console = Console(file=io.StringIO(), width=120)
    console.print(table(measured, run, 1))
    printed = console.file.getvalue()
    assert "too few to quote" in printed
    assert "1.000 - 1.000" in printed
