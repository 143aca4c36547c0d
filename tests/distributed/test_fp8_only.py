"""Training without the weights beside their codes: the run that keeps them, bit for bit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy
from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.precision import ReleasedParameter
from tests.kit.fp8_only_runs import differences, expert_weights, module_in
from tests.kit.rank_trainers import (
    batches,
    join_lightning,
    loader,
    rank_trainer,
)
from tests.kit.ranks import run_ranks

LAYOUTS = pytest.mark.parametrize(
    ("world", "ep", "precision"),
    [
        (1, 1, "32-true"),
        (1, 1, "bf16-mixed"),
        (2, 1, "32-true"),
        (2, 1, "bf16-true"),
        (2, 2, "32-true"),
        (2, 2, "bf16-true"),
        (4, 2, "bf16-true"),
    ],
)


@dataclass
class Seen:
    """What a fit went through.

    Attributes:
        losses: of every micro-batch.
        validated: validation losses, in order.
        released: per micro-batch, whether any and whether all expert weights were gone.
        saved: the checkpoint written within the fit, as one process would have written it.
        weights: after the fit.
    """

    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    released: list[bool] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Watcher(L.Callback):
    """Fills `Seen`; saves after the optimizer step `save_at`."""

    def __init__(self, seen: Seen, path: Path, save_at: int) -> None:
        self.seen, self.path, self.save_at = seen, path, save_at

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.seen.losses.append(outputs["loss"].item())
        kinds = {type(p) for p in expert_weights(pl_module)}
        assert len(kinds) == 1
        self.seen.released.append(kinds == {ReleasedParameter})
        if trainer.global_step == self.save_at and not self.seen.saved:
            trainer.save_checkpoint(self.path)
            self.seen.saved = read_whole(self.path)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.validated.append(trainer.callback_metrics["val/ce"].item())


def _fit(
    rank: int,
    world: int,
    ep: int,
    mode: str,
    path: Path,
    *,
    steps: int = 3,
    load: Path | None = None,
    **options: Any,
) -> Seen:
    """Steps of two micro-batches, clipped; validation before, in the middle and at the end."""
    module, seen = module_in(mode), Seen()
    defaults = {
        "precision": "32-true",
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
    }
    trainer = rank_trainer(
        world,
        ExpertParallelStrategy(ep, timeout=120.0),
        max_steps=steps,
        callbacks=[_Watcher(seen, path, steps)],
        **(defaults | options),
    )
    validation = DataLoader(batches(rank, world, 1), batch_size=None)
    trainer.fit(module, loader(rank, world), validation, ckpt_path=load)
    seen.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return seen


def _both(rank: int, world: int, ep: int, precision: str, folder: Path) -> tuple[Seen, Seen]:
    join_lightning(rank, world)
    kept, only = (
        _fit(rank, world, ep, mode, folder / mode, precision=precision) for mode in ("kept", "only")
    )
    return kept, only


@LAYOUTS
def test_losses_weights_masters_and_moments_equal_those_of_kept_weights_exactly(
    tmp_path: Path, world: int, ep: int, precision: str
) -> None:
    for kept, only in run_ranks(_both, world, ep, precision, tmp_path, timeout_s=180):
        assert only.released == [True] * 6
        assert kept.released == [False] * 6
        assert only.losses == kept.losses
        assert len(only.validated) == 2
        assert only.validated == kept.validated
        assert only.saved["state_dict"].keys() == kept.saved["state_dict"].keys()
        for part in ("state_dict", "optimizer_states"):
            assert differences(only.saved[part], kept.saved[part]) == []
        assert differences(only.weights, kept.weights) == []
        moments = only.saved["optimizer_states"][0]["state"]
        assert any("master" in state for state in moments.values()) == (precision == "bf16-true")


# (mode, ep) of one step each, after the other.
CHAINS = {
    "to float32 and back": [("only", 1), ("kept", 1), ("float32", 1), ("only", 1)],
    "over expert ranks": [("only", 1), ("only", 2), ("float32", 2), ("only", 1)],
}


def _chain(
    rank: int, world: int, links: list[tuple[str, int]], precision: str, folder: Path
) -> list[Any]:
    """What lies in the checkpoint after each link."""
    join_lightning(rank, world)
    path, saved = None, []
    for step, (mode, ep) in enumerate(links, start=1):
        new = folder / f"{step}"
        seen = _fit(rank, world, ep, mode, new, steps=step, load=path, precision=precision)
        path = new
        saved.append((seen.losses, seen.saved["state_dict"], seen.saved["optimizer_states"]))
    return saved


@pytest.mark.parametrize(
    ("chain", "precision"),
    [("to float32 and back", "32-true"), ("over expert ranks", "bf16-true")],
)
def test_a_resumed_run_may_keep_its_weights_or_not_and_change_precision_and_layout_exactly(
    tmp_path: Path, chain: str, precision: str
) -> None:
    links = CHAINS[chain]
    kept = [("kept" if mode == "only" else mode, ep) for mode, ep in links]
    ours = run_ranks(_chain, 2, links, precision, tmp_path / "ours", timeout_s=180)
    theirs = run_ranks(_chain, 2, kept, precision, tmp_path / "theirs", timeout_s=180)
    assert differences(ours, theirs) == []
    # A run that quantizes and one that doesn't part at once.
    assert ours[0][2][0] != ours[0][1][0]
