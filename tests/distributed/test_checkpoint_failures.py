"""A save that fails leaves the checkpoint of before, and says so on every rank."""

import os
import resource
import signal
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_moe import ExpertParallelStrategy
from lightning_moe.checkpoint.whole import read_whole
from tests.kit.rank_trainers import join_lightning, loader, make_module, rank_trainer
from tests.kit.ranks import run_ranks


def _weights(path: Path) -> float:
    return sum(w.double().abs().sum().item() for w in read_whole(path)["state_dict"].values())


def _save_on_a_full_disk(rank: int, world: int, path: Path, full: int) -> tuple[float, str]:
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=1)
    trainer.fit(make_module().double(), loader(rank, world))
    trainer.save_checkpoint(path)
    before = _weights(path)
    for parameter in trainer.lightning_module.parameters():
        parameter.data.add_(1.0)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        trainer.save_checkpoint(path)
    except RuntimeError as error:
        return before, str(error)
    return before, "no error"


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_any_rank_keeps_the_checkpoint_of_before(tmp_path: Path, full: int) -> None:
    path = tmp_path / "x.ckpt"
    for before, message in run_ranks(_save_on_a_full_disk, 2, path, full):
        assert message.startswith(f"no checkpoint at {path}: rank {full} could not write")
        assert _weights(path) == before
    assert [found.name for found in tmp_path.iterdir()] == ["x.ckpt"]


def _save_once(rank: int, world: int, path: Path) -> str:
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=1)
    trainer.fit(make_module().double(), loader(rank, world))
    try:
        trainer.save_checkpoint(path)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x.ckpt"
    for message in run_ranks(_save_once, 2, path):
        assert message.startswith(f"no checkpoint at {path}: rank 0: ")


class _DiesWhileSaving(L.Callback):
    """The second time, as if the machine went away."""

    def __init__(self) -> None:
        self.saves = 0

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: object
    ) -> None:
        self.saves += 1
        if self.saves == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _die_while_saving(rank: int, world: int, path: Path) -> None:
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=1, callbacks=[_DiesWhileSaving()])
    trainer.fit(make_module().double(), loader(rank, world))
    for _ in range(2):
        trainer.save_checkpoint(path)


def test_a_rank_that_dies_while_saving_keeps_the_checkpoint_of_before(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run_ranks(_die_while_saving, 2, tmp_path / "x.ckpt", timeout_s=100)
    assert read_whole(tmp_path / "x.ckpt")["global_step"] == 1


def test_a_checkpoint_that_was_just_moved_aside_is_found(tmp_path: Path) -> None:
    # Between the two renames that replace a folder, the old one has this name.
    run_ranks(_save_once, 2, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt").rename(tmp_path / "x.ckpt.previous")
    assert read_whole(tmp_path / "x.ckpt")["global_step"] == 1
    run_ranks(_save_once, 2, tmp_path / "x.ckpt")
    assert [found.name for found in tmp_path.iterdir()] == ["x.ckpt"]


def test_saving_over_a_link_replaces_the_link_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "x.ckpt").symlink_to("kept")
    run_ranks(_save_once, 2, tmp_path / "x.ckpt")
    assert read_whole(tmp_path / "x.ckpt")["global_step"] == 1
    assert list((tmp_path / "kept").iterdir()) == []
    assert not (tmp_path / "x.ckpt").is_symlink()


class _Fails(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("the reason")


def _fail_on_one_rank(rank: int, world: int, folder: Path) -> None:
    join_lightning(rank, world)
    callbacks = [_Fails(), OnExceptionCheckpoint(folder)]
    # To wait for the other rank would take longer than the test may.
    strategy = ExpertParallelStrategy(timeout=600.0)
    trainer = rank_trainer(
        world, strategy, max_steps=4, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(make_module().double(), loader(rank, world))


def test_a_checkpoint_on_exception_neither_hides_the_reason_nor_waits(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(?s:.*)ValueError: the reason\s*$"):
        run_ranks(_fail_on_one_rank, 2, tmp_path, timeout_s=180)
    assert list(tmp_path.iterdir()) == []
