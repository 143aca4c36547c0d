"""Lightning's ways to save, resume and copy work with checkpoint folders as they do with files."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_moe import ExpertParallelStrategy, MoEModule
from lightning_moe.callbacks import StartFrom
from lightning_moe.checkpoint.whole import read_whole
from tests.kit.checkpoint_runs import fit
from tests.kit.rank_trainers import Module, batches, loader, make_module, whole_state
from tests.kit.ranks import run_ranks


def _with_model_checkpoint(rank: int, world: int, folder: Path, last: object) -> dict[str, Any]:
    saver = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=last
    )
    trainer = fit(
        rank, world, make_module(), callbacks=[saver], enable_checkpointing=True, max_steps=4
    )
    resumed = make_module(3)
    again = ModelCheckpoint(folder, save_last=last)
    trainer = fit(
        rank,
        world,
        resumed,
        callbacks=[again],
        enable_checkpointing=True,
        max_steps=5,
        ckpt_path="last",
    )
    names = sorted(path.name for path in folder.iterdir())
    return {
        "names": names,
        "step": trainer.global_step,
        "link": (folder / "last.ckpt").is_symlink(),
    }


@pytest.mark.parametrize("last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last_folder(
    tmp_path: Path, last: bool | str
) -> None:
    for found in run_ranks(_with_model_checkpoint, 2, tmp_path, last):
        assert found["step"] == 5
        assert "last.ckpt" in found["names"]
        assert not any("partial" in name or "previous" in name for name in found["names"])
        assert not any("step=1" in name or "step=2" in name for name in found["names"])
        assert any("step=3" in name for name in found["names"])
        assert found["link"] == (last == "link")


def _with_url(rank: int, world: int, url: str) -> list[Any]:
    trainer = fit(rank, world, make_module(), max_steps=2)
    for _ in range(2):
        trainer.save_checkpoint(url)
    resumed = make_module(7)
    fit(rank, world, resumed, max_steps=2, ckpt_path=url)
    same = [
        torch.equal(a, b)
        for a, b in zip(resumed.parameters(), trainer.lightning_module.parameters(), strict=True)
    ]
    whole = read_whole(url)["state_dict"]["model.blocks.0.feed_forward.experts.w_down"]
    return [all(same), whole.shape[0]]


def test_a_folder_may_lie_at_any_url(tmp_path: Path) -> None:
    assert run_ranks(_with_url, 2, f"file://{tmp_path}/x.ckpt") == [[True, 4], [True, 4]]
    assert run_ranks(_with_url, 1, "memory://runs/x.ckpt") == [[True, 4]]


def _start_from(rank: int, world: int, ep: int, path: Path) -> object:
    states = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            states.append(whole_state(trainer, world, max(ep, 1)))
            states.append(trainer.optimizers[0].param_groups[0]["lr"])

    class Slow(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    strategy = ExpertParallelStrategy(ep) if ep else "auto"
    callbacks = [StartFrom(path), Look()]
    fit(rank, world, make_module(7, Slow), strategy=strategy, callbacks=callbacks)
    return states


def test_a_new_run_starts_from_a_folder_at_any_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run_ranks(_save_tiny, 2, path)
    expected = read_whole(path)
    for world, ep in ((2, 2), (4, 2), (1, 1), (1, 0)):
        state, rate = run_ranks(_start_from, world, ep, path)[0]
        torch.testing.assert_close(state.weights, dict(expected["state_dict"]), rtol=0, atol=0)
        saved = expected["optimizer_states"][0]["state"]
        for got, number in zip(state.moments.values(), saved, strict=True):
            assert got["exp_avg"].flatten().equal(saved[number]["exp_avg"].flatten())
            assert got["step"] == saved[number]["step"]
        assert state.step == 0
        assert rate == 1e-5


def _save_tiny(rank: int, world: int, path: Path) -> None:
    fit(rank, world, make_module(), max_steps=2).save_checkpoint(path)


def _copies(rank: int, world: int, path: Path) -> list[bool]:
    trainer = fit(rank, world, make_module(), max_steps=1)
    module: MoEModule = trainer.lightning_module
    trainer.validate(module, loader(rank, world), verbose=False)
    trainer.save_checkpoint(path)
    batch = batches(rank, world)[0]
    with torch.no_grad():
        expected, _ = module(batch.ids_BS)
        copied, _ = copy.deepcopy(module)(batch.ids_BS)
    module.trainer = None
    loaded = pickle.loads(pickle.dumps(module))
    weights = [
        torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True)
    ]
    return [torch.equal(copied, expected), all(weights)]


def test_a_spread_module_can_be_copied_pickled_and_saved_after_validation(tmp_path: Path) -> None:
    assert run_ranks(_copies, 2, tmp_path / "x.ckpt") == [[True, True]] * 2
    assert read_whole(tmp_path / "x.ckpt")["global_step"] == 1
