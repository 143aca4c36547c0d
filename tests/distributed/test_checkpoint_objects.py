"""Checkpoints need a module, its optimizers and a layout, and no Trainer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moe.checkpoint.checkpoints import Checkpoints
from lightning_moe.checkpoint.outline import read_outline
from tests.kit.ranks import run_ranks
from tests.kit.reducer_runs import Net, Setup, make_tokens, mean_square


def _run(world: int, ep: int, scale: float) -> tuple[Setup, Checkpoints]:
    """Weights that depend on `scale`, in bfloat16, whose optimizer keeps masters in float32."""
    module = Net(torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    setup = Setup(module, world, ep, split=True)
    return setup, Checkpoints(module, [setup.optimizer], setup.layout, setup.sharded)


def _values(setup: Setup) -> dict[str, Tensor]:
    """Weights, masters and moments of this rank."""
    assert setup.sharded is not None
    found = dict(setup.module.state_dict())
    for name, target in setup.sharded.targets.items():
        found[f"{name} master"] = target.detach()
        for key, value in setup.optimizer.state[target].items():
            found[f"{name} {key}"] = value
    return found


def _round_trip(rank: int, world: int, ep: int, path: str) -> bool:
    setup, checkpoints = _run(world, ep, 1.0)
    setup.backward(mean_square(setup.module, make_tokens(rank).to(torch.bfloat16)))
    setup.optimizer.step()
    state = checkpoints.optimizer_state(setup.optimizer)
    checkpoints.save(
        {"state_dict": setup.module.state_dict(), "optimizer_states": [state], "epoch": 3}, path
    )
    other, loading = _run(world, ep, 0.5)
    loaded = loading.load(path)
    loading.load_weights(loaded["state_dict"])
    loading.load_optimizers(loaded["optimizer_states"])
    expected, found = _values(setup), _values(other)
    return loaded["epoch"] == 3 and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2)])
def test_weights_masters_and_moments_come_back_exactly(tmp_path: Path, world: int, ep: int) -> None:
    path = tmp_path / "x.ckpt"
    assert run_ranks(_round_trip, world, ep, str(path)) == [True] * world
    for file in path.glob("*.distcp"):
        file.unlink()
    outline = read_outline(str(path))  # it needs none of the tensors
    assert outline.meta == {"epoch": 3}
    assert tuple(outline.tensors["state_dict", "wide.weight"].size) == (768, 6)
    assert tuple(outline.tensors["state_dict", "moe.experts.w_down"].size) == (8, 3, 6)
    assert tuple(outline.tensors["optimizer_0", "moe.experts.w_down", "exp_avg"].size) == (144,)
    assert outline.experts["moe.experts.w_down"] == 8
    assert len(outline.ranks) == world
