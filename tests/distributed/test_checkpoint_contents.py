"""What a checkpoint folder keeps, for each rank and for callbacks, and what it refuses to load."""

import copy
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_moe import ExpertParallelStrategy, MoEConfig, MoEModule, RouterConfig, TokenBatch
from lightning_moe.callbacks import StartFrom
from lightning_moe.nn import MoE
from lightning_moe.parallel.whole_checkpoint import read_whole
from tests.distributed.lightning_ranks import (
    NUM_EXPERTS,
    VOCAB_SIZE,
    Module,
    Resumable,
    batches,
    join_lightning,
    loader,
    make_module,
    make_trainer,
    whole_state,
)
from tests.ranks import run_ranks


class OwnModule(L.LightningModule):
    """A user's own: dropout, jitter, and one MoE layer."""

    def __init__(self, *, hidden_size: int = 5, groups: int = 1, **hparams: object) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.groups = groups
        self.embedding = nn.Embedding(VOCAB_SIZE, 6)
        self.dropout = nn.Dropout(0.3)
        router = RouterConfig(top_k=2, jitter_eps=0.1, bias_gamma=1e-2)
        self.moe = MoE(
            6, MoEConfig(num_experts=NUM_EXPERTS, hidden_size=hidden_size, router=router)
        )
        self.head = nn.Linear(6, VOCAB_SIZE)
        self.losses: list[float] = []

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        y_BSD, _ = self.moe(self.dropout(self.embedding(batch.ids_BS)))
        loss = nn.functional.cross_entropy(
            self.head(y_BSD).flatten(0, 1), batch.labels_BS.flatten()
        )
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        y_BSD, _ = self.moe(self.embedding(batch.ids_BS))
        self.log("size", y_BSD.square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        cut = len(parameters) // self.groups
        parts = [parameters[:cut], parameters[cut:]][: self.groups]
        return torch.optim.AdamW([{"params": part} for part in parts], lr=1e-2)


def _own(seed: int = 0, **options: int | object) -> OwnModule:
    torch.manual_seed(seed)
    return OwnModule(**options)


def _fit(rank: int, world: int, module: L.LightningModule, **options: object) -> L.Trainer:
    join_lightning(rank, world)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(world, **({"precision": "32-true"} | options))
    trainer.fit(module, loader(rank, world), ckpt_path=ckpt_path)
    return trainer


def _message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- per rank -------------------------------------------------------------------------------------------------


def _noise(
    rank: int, world: int, steps: int, save: Path | None, load: Path | None
) -> tuple[list[float], Tensor]:
    torch.manual_seed(rank)
    module = OwnModule()
    torch.manual_seed(100 + rank + (0 if load is None else 50))
    trainer = _fit(rank, world, module, max_steps=steps, ckpt_path=load)
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
    trainer = make_trainer(world, max_steps=steps, precision="32-true")
    trainer.fit(_own(), data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return data.loaded


def test_each_ranks_loader_gets_its_own_state_back(tmp_path: Path) -> None:
    run_ranks(_positions, 2, 3, tmp_path / "x.ckpt", None)
    loaded = run_ranks(_positions, 2, 5, None, tmp_path / "x.ckpt")
    assert loaded == [{"given": 3, "rank": 0}, {"given": 3, "rank": 1}]


# ---- averaged weights -----------------------------------------------------------------------------------------


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

    trainer = _fit(
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


# ---- everything that is no tensor of the model ------------------------------------------------------------------


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
    module = _own(conf=hparams)
    module.extra = _WithExtraState()
    module.extra.note = "old" if load is None else "new"
    callback = _Keeps(VALUES if load is None else None)
    steps = 2 if load is None else 3
    trainer = _fit(rank, world, module, callbacks=[callback], max_steps=steps, ckpt_path=load)
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
    trainer = _fit(rank, world, _own(), callbacks=[_Keeps(1)], max_steps=1)
    trainer.save_checkpoint(path)
    trainer.callbacks[-1].value = trainer.callbacks[0].value = _Custom()
    return _message_of(lambda: trainer.save_checkpoint(path))


def test_state_that_could_not_be_loaded_again_is_refused_when_saving(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for message in run_ranks(_keep_custom, 2, path):
        assert message.startswith(f"RuntimeError: no checkpoint at {path}: rank 0: TypeError")
        assert "no plain type" in message
        assert "_Custom" in message
    assert read_whole(path)["global_step"] == 1


def _save_sizes(rank: int, world: int, path: Path) -> tuple[list[int], int]:
    module = _own(hidden_size=20_000)
    whole = [*module.parameters()] * 3 + [*module.buffers()]  # weights and two moments
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in whole)
    trainer = _fit(rank, world, module, max_steps=1)
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


class _Shares(OwnModule):
    """Two names for one MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.moe


def _save_shared(rank: int, world: int, path: Path) -> None:
    torch.manual_seed(0)
    _fit(rank, world, _Shares(), max_steps=1).save_checkpoint(path)


def test_experts_with_two_names_are_whole_under_both(tmp_path: Path) -> None:
    run_ranks(_save_shared, 2, tmp_path / "x.ckpt")
    weights = read_whole(tmp_path / "x.ckpt")["state_dict"]
    assert weights["moe.experts.w_down"].shape[0] == NUM_EXPERTS
    torch.testing.assert_close(
        weights["again.experts.w_down"], weights["moe.experts.w_down"], rtol=0, atol=0
    )


# ---- refusals -------------------------------------------------------------------------------------------------


def _save_own(
    rank: int, world: int, path: Path, weights_only: bool, options: dict[str, int]
) -> None:
    trainer = _fit(rank, world, _own(**options), max_steps=2)
    trainer.save_checkpoint(path, weights_only=weights_only)


def _load_own(
    rank: int, world: int, paths: list[Path], strict: bool, options: dict[str, int]
) -> list[str]:
    messages = []
    for path in paths:
        module = _own(**options)
        module.strict_loading = strict
        messages.append(_message_of(lambda: _fit(rank, world, module, ckpt_path=path)))  # noqa: B023
    return messages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "x.ckpt"
    run_ranks(_save_own, 2, path, False, {})
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
        trainer = make_trainer(world, precision="32-true")
        module = _own(seed=0 if ckpt_path is None else 5)
        if ckpt_path is None:
            trainer.fit(module, loader(rank, world))
        data = loader(rank, world)
        sizes.append(trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)[0]["size"])
    fit = _message_of(lambda: _fit(rank, world, _own(), ckpt_path=path))
    start = _message_of(lambda: _fit(rank, world, _own(), callbacks=[StartFrom(path)]))
    _fit(rank, world, _own(), callbacks=[StartFrom(path, moments=False)])
    return fit, start, sizes


def test_weights_alone_can_be_validated_and_started_from_but_not_resumed(tmp_path: Path) -> None:
    run_ranks(_save_three, 2, tmp_path / "x.ckpt")
    for fit, start, sizes in run_ranks(_start_weights, 2, tmp_path / "x.ckpt"):
        assert "optimizer state but checkpoint contains only the model" in fit
        assert "holds the state of 0 optimizers, this run has 1" in start
        assert sizes[0] == sizes[1]


def _save_three(rank: int, world: int, path: Path) -> None:
    _fit(rank, world, _own(), max_steps=3).save_checkpoint(path, weights_only=True)


def _refuse_async(rank: int, world: int) -> str:
    return _message_of(lambda: _fit(rank, world, _own(), plugins=[AsyncCheckpointIO()]))


def test_a_plugin_for_single_files_is_refused() -> None:
    for message in run_ranks(_refuse_async, 2):
        assert "AsyncCheckpointIO has no effect on ExpertParallelStrategy" in message


# ---- Lightning's ways to save and load ------------------------------------------------------------------------


def _with_model_checkpoint(rank: int, world: int, folder: Path, last: object) -> dict[str, Any]:
    saver = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=last
    )
    trainer = _fit(
        rank, world, make_module(), callbacks=[saver], enable_checkpointing=True, max_steps=4
    )
    resumed = make_module(3)
    again = ModelCheckpoint(folder, save_last=last)
    trainer = _fit(
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
    trainer = _fit(rank, world, make_module(), max_steps=2)
    for _ in range(2):
        trainer.save_checkpoint(url)
    resumed = make_module(7)
    _fit(rank, world, resumed, max_steps=2, ckpt_path=url)
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
    _fit(rank, world, make_module(7, Slow), strategy=strategy, callbacks=callbacks)
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
    _fit(rank, world, make_module(), max_steps=2).save_checkpoint(path)


def _copies(rank: int, world: int, path: Path) -> list[bool]:
    trainer = _fit(rank, world, make_module(), max_steps=1)
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
