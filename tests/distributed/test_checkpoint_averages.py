"""Averaged weights in a checkpoint folder hold all experts, and go on at any number of ranks."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_moe import ExpertParallelStrategy
from lightning_moe.checkpoint.whole import read_whole
from tests.kit.checkpoint_runs import fit
from tests.kit.rank_trainers import NUM_EXPERTS, make_module, whole_state
from tests.kit.ranks import run_ranks


def _averaging(kind: str) -> L.Callback:
    if kind == "swa":
        return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    return WeightAveraging(avg_fn=_half)


def _half(old: Tensor, new: Tensor, _count: Tensor) -> Tensor:
    return (old + new) / 2


def _averaged(
    rank: int, world: int, kind: str, ep: int, epochs: int, save: Path | None, load: Path | None
) -> object:
    callback = _averaging(kind)
    module = make_module(0 if load is None else 7).double()
    saved: list[str] = []

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if save is not None and trainer.current_epoch == 1:
                trainer.save_checkpoint(save)
                saved.append("x")

    trainer = fit(
        rank,
        world,
        module,
        strategy=ExpertParallelStrategy(ep),
        callbacks=[callback, Save()],
        max_steps=-1,
        max_epochs=epochs,
        limit_train_batches=2,
        precision="64-true",
        gradient_clip_val=None,
        ckpt_path=load,
    )
    return whole_state(trainer, world, ep).weights


def test_weight_averaging_keeps_all_experts_and_resumes_at_other_ranks(tmp_path: Path) -> None:
    straight = run_ranks(_averaged, 1, "ema", 1, 4, None, None)[0]
    run_ranks(_averaged, 2, "ema", 2, 2, tmp_path / "x.ckpt", None)
    folder = read_whole(tmp_path / "x.ckpt")
    for tree in ("state_dict", "current_model_state"):
        experts = folder[tree]["model.blocks.0.feed_forward.experts.w_down"]
        assert experts.shape[0] == NUM_EXPERTS
    for world, ep in ((2, 2), (1, 1), (4, 2)):
        resumed = run_ranks(_averaged, world, "ema", ep, 4, None, tmp_path / "x.ckpt")[0]
        torch.testing.assert_close(resumed, straight, rtol=1e-9, atol=1e-12)


def test_stochastic_weight_averaging_keeps_all_experts(tmp_path: Path) -> None:
    straight = run_ranks(_averaged, 1, "swa", 1, 3, None, None)[0]
    spread = run_ranks(_averaged, 2, "swa", 2, 3, tmp_path / "x.ckpt", None)[0]
    torch.testing.assert_close(spread, straight, rtol=1e-9, atol=1e-12)
    folder = read_whole(tmp_path / "x.ckpt")
    [average] = [
        state["average_model_state"]
        for name, state in folder["callbacks"].items()
        if "Stochastic" in name
    ]
    experts = next(value for name, value in average.items() if name.endswith("experts.w_down"))
    assert experts.shape[0] == NUM_EXPERTS
