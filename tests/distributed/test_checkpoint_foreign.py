"""Checkpoint folders are read as data, and put only where nothing but a checkpoint was before."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_moe.checkpoint.whole import load_weights, read_whole, read_without_tensors
from tests.kit.checkpoint_runs import message_of
from tests.kit.rank_trainers import join_lightning, loader, make_module, rank_trainer
from tests.kit.ranks import run_ranks


def _save(rank: int, world: int, path: Path) -> str:
    """What saving raises."""
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=1)
    trainer.fit(make_module().double(), loader(rank, world))
    return message_of(trainer.save_checkpoint, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    assert run_ranks(_save, 2, path) == ["no error"] * 2
    return path


def _copied(saved: Path, folder: Path) -> Path:
    path = folder / "a.ckpt"
    path.mkdir()
    for file in saved.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


class _LeavesAMark:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda content: content.replace(old, new)


@pytest.mark.parametrize("read", [read_whole, read_without_tensors])
def test_metadata_that_would_run_code_runs_nothing(
    saved: Path, tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path, mark = _copied(saved, tmp_path), tmp_path / "mark"
    (path / ".metadata").write_bytes(pickle.dumps(_LeavesAMark(mark)))
    with pytest.raises(ValueError, match=r"a\.ckpt.*would load posix\.mkdir"):
        read(path)
    assert not mark.exists()


def _load(rank: int, world: int, path: Path) -> str:
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=2)
    module = make_module().double()
    return message_of(trainer.fit, module, loader(rank, world), ckpt_path=path)


def test_ranks_that_resume_run_no_code_either(saved: Path, tmp_path: Path) -> None:
    path, mark = _copied(saved, tmp_path), tmp_path / "mark"
    (path / ".metadata").write_bytes(pickle.dumps(_LeavesAMark(mark)))
    for message in run_ranks(_load, 2, path):
        assert "would load posix.mkdir" in message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], "is damaged"),
        (lambda content: b"", "is damaged"),
        (lambda content: pickle.dumps([1]), "it holds a list"),
        (_replaced(b"__1_0.distcp", b"../x0.distcp"), "lies outside of the folder"),
    ],
)
def test_damaged_metadata_is_told_in_a_line_that_names_the_file(
    saved: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = _copied(saved, tmp_path)
    content = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(change(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_whole(path)
    assert ".metadata" in str(caught.value)


def test_a_shape_beyond_what_the_files_hold_is_refused_before_memory_is_taken(
    saved: Path, tmp_path: Path
) -> None:
    path = _copied(saved, tmp_path)
    content = (path / ".metadata").read_bytes()
    # d_model of 64 as a byte; as four bytes, more than any machine has.
    grown = content.replace(b"K@", b"J\xff\xff\xff\x7f")
    (path / ".metadata").write_bytes(grown)
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        read_whole(path)


def test_reading_without_tensors_tells_names_shapes_and_options(saved: Path) -> None:
    whole, outline = read_whole(saved), read_without_tensors(saved)
    assert outline["global_step"] == whole["global_step"] == 1
    assert outline["hyper_parameters"] == whole["hyper_parameters"]
    assert "optimizer_states" not in outline
    assert outline["state_dict"].keys() == whole["state_dict"].keys()
    for name, value in outline["state_dict"].items():
        assert value.is_meta
        assert value.shape == whole["state_dict"][name].shape


def test_a_files_outline_is_that_of_its_folder(saved: Path, tmp_path: Path) -> None:
    torch.save(read_whole(saved), tmp_path / "file.ckpt")
    outline = read_without_tensors(tmp_path / "file.ckpt")
    shapes = {name: value.shape for name, value in outline["state_dict"].items()}
    assert all(value.is_meta for value in outline["state_dict"].values())
    folder = read_without_tensors(saved)["state_dict"]
    assert shapes == {name: value.shape for name, value in folder.items()}


def test_weights_alone_are_loaded_without_the_optimizers(saved: Path) -> None:
    module = make_module(seed=1).double()
    load_weights(module, saved)
    weights = read_whole(saved, optimizers=False)
    assert "optimizer_states" not in weights
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights["state_dict"][name]), name


@pytest.mark.parametrize("place", ["out", "out.previous", "out.partial"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir()
    (folder / "file").write_text("mine")
    for message in run_ranks(_save, 2, tmp_path / "out"):
        assert f"{place} holds file, which is of no checkpoint" in message
    assert (folder / "file").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for message in run_ranks(_save, 2, tmp_path / "out"):
        assert "out is a file, and no checkpoint" in message
    assert (tmp_path / "out").read_text() == "mine"


def test_a_checkpoint_with_something_of_the_users_in_it_is_not_replaced(
    saved: Path, tmp_path: Path
) -> None:
    path = _copied(saved, tmp_path)
    (path / "notes.txt").write_text("mine")
    assert "notes.txt" in run_ranks(_save, 2, path)[0]
    assert (path / "notes.txt").read_text() == "mine"
    read_whole(path)


def test_an_earlier_checkpoint_folder_or_file_is_replaced(saved: Path, tmp_path: Path) -> None:
    path = _copied(saved, tmp_path)
    assert run_ranks(_save, 2, path) == ["no error"] * 2
    torch.save({"state_dict": {}}, tmp_path / "file.ckpt")
    assert run_ranks(_save, 2, tmp_path / "file.ckpt") == ["no error"] * 2
    assert (tmp_path / "file.ckpt").is_dir()
