"""What belongs to one rank alone comes back to it: random numbers and the position in its data."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kit.checkpoint_runs import fit, make_own
from tests.kit.modules import Dropping
from tests.kit.rank_trainers import Resumable, batches, join_lightning, rank_trainer
from tests.kit.ranks import run_ranks


def _noise(
    rank: int, world: int, steps: int, save: Path | None, load: Path | None
) -> tuple[list[float], Tensor]:
    torch.manual_seed(rank)
    module = Dropping()
    torch.manual_seed(100 + rank + (0 if load is None else 50))
    trainer = fit(rank, world, module, max_steps=steps, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.losses, torch.rand(3)


def test_each_ranks_noise_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    straight = run_ranks(_noise, 2, 6, None, None)
    first = run_ranks(_noise, 2, 3, tmp_path / "x.ckpt", None)
    second = run_ranks(_noise, 2, 6, None, tmp_path / "x.ckpt")
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == straight[rank][0]
        assert second[rank][1].equal(straight[rank][1])
    assert not straight[0][1].equal(straight[1][1])


class _Numbered(Resumable):
    """Whose position depends on the rank."""

    rank = 0
    loaded: Any = None

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.loaded = state


def _positions(rank: int, world: int, steps: int, save: Path | None, load: Path | None) -> object:
    join_lightning(rank, world)
    data = _Numbered(batches(rank, world), batch_size=None)
    data.rank = rank
    trainer = rank_trainer(world, max_steps=steps, precision="32-true")
    trainer.fit(make_own(), data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return data.loaded


def test_each_ranks_loader_gets_its_own_state_back(tmp_path: Path) -> None:
    run_ranks(_positions, 2, 3, tmp_path / "x.ckpt", None)
    loaded = run_ranks(_positions, 2, 5, None, tmp_path / "x.ckpt")
    assert loaded == [{"given": 3, "rank": 0}, {"given": 3, "rank": 1}]
