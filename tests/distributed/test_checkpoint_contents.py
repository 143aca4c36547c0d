"""What a checkpoint folder keeps besides the tensors of the model, and how large it is."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_moe.checkpoint.whole import read_whole
from tests.kit.checkpoint_runs import fit, make_own, message_of
from tests.kit.modules import Dropping
from tests.kit.rank_trainers import NUM_EXPERTS
from tests.kit.ranks import run_ranks


class _Keeps(L.Callback):
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


VALUES = {
    "path": Path("runs") / "a",
    "score": np.float64(0.25),
    "pair": (1, 2.5, "x"),
    "set": {1, 2},
    "tensor": torch.arange(3),
    "ordered": OrderedDict(a=1),
}


class _WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def _keep(rank: int, world: int, save: Path | None, load: Path | None) -> object:
    hparams = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "sizes": [1, 2]})
    module = make_own(conf=hparams)
    module.extra = _WithExtraState()
    module.extra.note = "old" if load is None else "new"
    callback = _Keeps(VALUES if load is None else None)
    steps = 2 if load is None else 3
    trainer = fit(rank, world, module, callbacks=[callback], max_steps=steps, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
        trainer.save_checkpoint(save)
    return callback.value, module.extra.note


def test_omegaconf_hyper_parameters_callback_state_and_extra_state_come_back(
    tmp_path: Path,
) -> None:
    run_ranks(_keep, 2, tmp_path / "x.ckpt", None)
    hparams = read_whole(tmp_path / "x.ckpt")["hyper_parameters"]
    assert hparams == {"conf": {"lr": 0.1, "twice": 0.1, "sizes": [1, 2]}}
    for value, note in run_ranks(_keep, 2, None, tmp_path / "x.ckpt"):
        assert note == "old"
        assert value["path"] == "runs/a"
        assert value["tensor"].tolist() == [0, 1, 2]
        others = {k: v for k, v in value.items() if k not in ("path", "tensor")}
        assert others == {"score": 0.25, "pair": (1, 2.5, "x"), "set": {1, 2}, "ordered": {"a": 1}}


class _Custom:
    """No plain type."""


def _keep_custom(rank: int, world: int, path: Path) -> str:
    trainer = fit(rank, world, make_own(), callbacks=[_Keeps(1)], max_steps=1)
    trainer.save_checkpoint(path)
    trainer.callbacks[-1].value = trainer.callbacks[0].value = _Custom()
    return message_of(trainer.save_checkpoint, path)


def test_state_that_could_not_be_loaded_again_is_refused_when_saving(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for message in run_ranks(_keep_custom, 2, path):
        assert message.startswith(f"RuntimeError: no checkpoint at {path}: rank 0: TypeError")
        assert "no plain type" in message
        assert "_Custom" in message
    assert read_whole(path)["global_step"] == 1


def _save_sizes(rank: int, world: int, path: Path) -> tuple[list[int], int]:
    module = make_own(hidden_size=20_000)
    whole = [*module.parameters()] * 3 + [*module.buffers()]  # weights and two moments
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in whole)
    trainer = fit(rank, world, module, max_steps=1)
    sizes = []
    for _ in range(2):
        trainer.save_checkpoint(path)
        sizes.append(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
        trainer.strategy.barrier()
    return sizes, num_bytes


def test_a_folder_holds_each_element_once_and_does_not_grow(tmp_path: Path) -> None:
    [first, second], num_bytes = run_ranks(_save_sizes, 4, tmp_path / "x.ckpt")[0]
    assert num_bytes <= first <= 1.05 * num_bytes
    assert abs(second - first) < 1000


class _Shares(Dropping):
    """Two names for one MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.moe


def _save_shared(rank: int, world: int, path: Path) -> None:
    torch.manual_seed(0)
    fit(rank, world, _Shares(), max_steps=1).save_checkpoint(path)


def test_experts_with_two_names_are_whole_under_both(tmp_path: Path) -> None:
    run_ranks(_save_shared, 2, tmp_path / "x.ckpt")
    weights = read_whole(tmp_path / "x.ckpt")["state_dict"]
    assert weights["moe.experts.w_down"].shape[0] == NUM_EXPERTS
    torch.testing.assert_close(
        weights["again.experts.w_down"], weights["moe.experts.w_down"], rtol=0, atol=0
    )
