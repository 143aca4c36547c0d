"""Which checkpoints are refused, and that every rank says why."""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_moe.callbacks import StartFrom
from lightning_moe.checkpoint.whole import read_whole
from tests.kit.checkpoint_runs import fit, make_own, message_of
from tests.kit.rank_trainers import join_lightning, loader, rank_trainer
from tests.kit.ranks import run_ranks


def _save_own(rank: int, world: int, path: Path, steps: int, weights_only: bool) -> None:
    trainer = fit(rank, world, make_own(), max_steps=steps)
    trainer.save_checkpoint(path, weights_only=weights_only)


def _load_own(
    rank: int, world: int, paths: list[Path], strict: bool, options: dict[str, int]
) -> list[str]:
    messages = []
    for path in paths:
        module = make_own(**options)
        module.strict_loading = strict
        messages.append(message_of(fit, rank, world, module, ckpt_path=path))
    return messages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "x.ckpt"
    run_ranks(_save_own, 2, path, 2, False)
    return path


def test_a_missing_renamed_or_misshapen_expert_weight_is_named_on_all_ranks(
    tmp_path: Path, saved: Path
) -> None:
    key = "moe.experts.w_down"
    paths = []
    for name in ("deleted", "renamed", "misshapen"):
        checkpoint = read_whole(saved)
        weight = checkpoint["state_dict"].pop(key)
        if name == "renamed":
            checkpoint["state_dict"]["moe.expert.w_down"] = weight
        if name == "misshapen":
            checkpoint["state_dict"][key] = weight[:, :-1].clone()
        paths.append(tmp_path / f"{name}.ckpt")
        torch.save(checkpoint, paths[-1])
    for deleted, renamed, misshapen in run_ranks(_load_own, 2, paths, True, {}):
        assert "Missing key" in deleted
        assert key in deleted
        assert key in renamed
        assert 'Unexpected key(s) in state_dict: "moe.expert.w_down"' in renamed
        assert f"size mismatch for {key}" in misshapen
    for deleted, renamed, misshapen in run_ranks(_load_own, 2, paths, False, {}):
        assert deleted == renamed == "no error"
        assert f"size mismatch for {key}" in misshapen


def test_a_folder_of_another_model_or_other_optimizer_groups_is_refused_on_all_ranks(
    saved: Path,
) -> None:
    for [message] in run_ranks(_load_own, 2, [saved], True, {"hidden_size": 7}):
        assert "size mismatch for moe.experts.w_down" in message
    for [message] in run_ranks(_load_own, 2, [saved], True, {"groups": 2}):
        assert "ValueError: the checkpoint's optimizer holds other parameters" in message
        assert "in other groups or another order" in message


def test_a_damaged_checkpoint_is_one_clear_error_on_all_ranks(tmp_path: Path, saved: Path) -> None:
    paths = []
    for name in ("no meta.pt", "no .metadata", "short meta.pt", "short data", "no data"):
        folder = tmp_path / f"{name}.ckpt".replace(" ", "-")
        shutil.copytree(saved, folder)
        what, file = name.split()
        for target in folder.glob("*.distcp") if file == "data" else [folder / file]:
            if what == "no":
                target.unlink()
            else:
                target.write_bytes(target.read_bytes()[:100])
        paths.append(folder)
    paths += [tmp_path / "short.ckpt", tmp_path / "nothing.ckpt"]
    torch.save(read_whole(saved), paths[-2])
    paths[-2].write_bytes(paths[-2].read_bytes()[:1000])
    for messages in run_ranks(_load_own, 2, paths, True, {}):
        for message, path in zip(messages, paths, strict=True):
            kind = "FileNotFoundError" if path.stem == "nothing" else "ValueError"
            assert message.startswith(kind), message
            assert str(path) in message


def _start_weights(rank: int, world: int, path: Path) -> tuple[str, str, list[float]]:
    join_lightning(rank, world)
    sizes = []
    for ckpt_path in (None, path):
        trainer = rank_trainer(world, precision="32-true")
        module = make_own(seed=0 if ckpt_path is None else 5)
        if ckpt_path is None:
            trainer.fit(module, loader(rank, world))
        data = loader(rank, world)
        sizes.append(trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)[0]["size"])
    resumed = message_of(fit, rank, world, make_own(), ckpt_path=path)
    started = message_of(fit, rank, world, make_own(), callbacks=[StartFrom(path)])
    fit(rank, world, make_own(), callbacks=[StartFrom(path, moments=False)])
    return resumed, started, sizes


def test_weights_alone_can_be_validated_and_started_from_but_not_resumed(tmp_path: Path) -> None:
    run_ranks(_save_own, 2, tmp_path / "x.ckpt", 3, True)
    for resumed, started, sizes in run_ranks(_start_weights, 2, tmp_path / "x.ckpt"):
        assert "optimizer state but checkpoint contains only the model" in resumed
        assert "holds the state of 0 optimizers, this run has 1" in started
        assert sizes[0] == sizes[1]


def _refuse_async(rank: int, world: int) -> str:
    return message_of(fit, rank, world, make_own(), plugins=[AsyncCheckpointIO()])


def test_a_plugin_for_single_files_is_refused() -> None:
    for message in run_ranks(_refuse_async, 2):
        assert "AsyncCheckpointIO has no effect on ExpertParallelStrategy" in message
