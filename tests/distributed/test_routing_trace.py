"""Two ranks that share experts trace what one rank traces, each its own tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_moe import MoEModule
from lightning_moe.callbacks import RoutingTrace
from lightning_moe.cli import main
from lightning_moe.metrics.route_comparison import read_trace
from tests.kit.rank_runs import batches, config, fit, parallel
from tests.kit.ranks import run_ranks


def _traced(rank: int, world: int, folder: str, recompute: str) -> None:
    torch.manual_seed(0)
    fit(
        rank,
        world,
        MoEModule(config(recompute=recompute)),
        batches(rank, world, steps=3, accumulate=2),
        strategy=parallel(world),
        accumulate_grad_batches=2,
        callbacks=[RoutingTrace([0, 2])],
        default_root_dir=folder,
    )


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_ranks_files_together_hold_what_one_rank_traces(tmp_path: Path, recompute: str) -> None:
    for world in (1, 2):
        run_ranks(_traced, world, str(tmp_path / str(world)), recompute)
    one, two = read_trace(tmp_path / "1"), read_trace(tmp_path / "2")
    assert list(one) == list(two)
    assert len(one) == 2 * 2 * 2
    for key, (whole,) in one.items():
        for field in ("ids", "weights", "margins", "valid"):
            parts = np.concatenate([getattr(routes, field) for routes in two[key]])
            np.testing.assert_allclose(parts, getattr(whole, field), rtol=1e-9)
    assert main(["routes-diff", str(tmp_path / "2"), str(tmp_path / "2")]) == 0
    assert main(["routes-diff", str(tmp_path / "1"), str(tmp_path / "2")]) == 2
