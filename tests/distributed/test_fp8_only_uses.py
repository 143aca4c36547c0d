"""Training without the weights beside their codes: evaluation, reloading, manual steps, frozen weights."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy, MoEModule
from lightning_moe.precision import ReleasedParameter
from tests.kit.fp8_only_runs import differences, expert_weights, module_in
from tests.kit.rank_trainers import (
    Module,
    batches,
    join_lightning,
    loader,
    rank_trainer,
)
from tests.kit.ranks import run_ranks


def _evaluations(rank: int, world: int, ep: int) -> list[Any]:
    join_lightning(rank, world)
    found = []
    for mode in ("kept", "only"):
        module = module_in(mode)
        data = DataLoader(batches(rank, world, 2), batch_size=None)

        def trainer(steps: int) -> L.Trainer:
            return rank_trainer(
                world,
                ExpertParallelStrategy(ep, timeout=120.0),
                max_steps=steps,
                precision="32-true",
            )

        results: list[Any] = [trainer(1).validate(module, data, verbose=False)]
        results.append(trainer(1).test(module, data, verbose=False))
        both = trainer(2)
        both.fit(module, loader(rank, world))
        results.append(both.validate(module, data, verbose=False))
        both.fit_loop.epoch_loop.max_steps = 4
        both.fit(module, loader(rank, world))
        results.append(both.test(module, data, verbose=False))
        results.append({n: t.clone() for n, t in module.state_dict().items()})
        found.append(results)
    return found


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1)])
def test_evaluation_without_a_fit_after_one_and_a_second_fit_are_the_same_exactly(
    world: int, ep: int
) -> None:
    for kept, only in run_ranks(_evaluations, world, ep, timeout_s=180):
        assert differences(only, kept) == []


class _Reload(L.Callback):
    """Goes back to the checkpoint of the first step after the second one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        strategy = trainer.strategy
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 2:
            moved = strategy.lightning_module_state_dict()
            checkpoint = strategy.load_checkpoint(self.path)
            strategy.load_model_state_dict(checkpoint)
            strategy.load_optimizer_state_dict(checkpoint)
            back = strategy.lightning_module_state_dict()
            name = next(name for name in back if name.endswith("w_down"))
            self.found = {
                "moved": not torch.equal(moved[name], back[name]),
                "back": torch.equal(back[name], checkpoint["state_dict"][name]),
                "released": all(type(p) is ReleasedParameter for p in expert_weights(pl_module)),
                "output": _output(pl_module),
            }


def _output(module: MoEModule) -> Tensor:
    experts = module.moe_layers[0].experts
    counts = torch.zeros(len(experts.expert_ids), dtype=torch.int64)
    counts[0] = 2
    with torch.no_grad():
        return experts(torch.ones(2, 64, dtype=experts.w_down.dtype), counts)


def _reload(rank: int, world: int, path: Path, precision: str) -> dict[str, Any]:
    join_lightning(rank, world)
    reload = _Reload(path)
    trainer = rank_trainer(
        world,
        ExpertParallelStrategy(1, timeout=120.0),
        max_steps=2,
        precision=precision,
        callbacks=[reload],
    )
    module = module_in("only")
    trainer.fit(module, loader(rank, world))
    return reload.found | {"afterwards": _output(module)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_loaded_in_the_middle_of_a_fit_reaches_masters_and_codes(
    tmp_path: Path, precision: str
) -> None:
    for found in run_ranks(_reload, 2, tmp_path / "a.ckpt", precision, timeout_s=120):
        assert found["moved"]
        assert found["back"]
        assert found["released"]
        # From codes, and from the weights that came back.
        assert torch.equal(found["output"], found["afterwards"])


class _Manual(Module):
    """Steps by itself, after every second micro-batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def _variant(rank: int, world: int, manual: bool, **strategy: Any) -> list[str]:
    join_lightning(rank, world)
    found = []
    for mode in ("kept", "only"):
        module = module_in(mode, kind=_Manual if manual else Module)
        trainer = rank_trainer(
            world,
            ExpertParallelStrategy(world, timeout=120.0, **strategy),
            precision="32-true",
            gradient_clip_val=None,
        )
        trainer.fit(module, loader(rank, world))
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return differences(*found)


def _manual(rank: int, world: int) -> list[str]:
    return _variant(rank, world, manual=True)


def _static(rank: int, world: int) -> list[str]:
    return _variant(rank, world, manual=False, dispatcher="static", capacity_factor=1.0)


@pytest.mark.parametrize(("world", "variant"), [(1, _manual), (2, _manual), (2, _static)])
def test_manual_steps_and_static_dispatch_are_the_same_exactly(world: int, variant: Any) -> None:
    assert run_ranks(variant, world) == [[]] * world


def _frozen(rank: int, world: int) -> list[str]:
    join_lightning(rank, world)
    module = module_in("only")
    weights = expert_weights(module)
    for weight in weights:
        weight.requires_grad_(False)
    before = [weight.detach().clone() for weight in weights]

    class Others(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: object) -> None:
            assert all(type(p) is ReleasedParameter for p in expert_weights(pl_module))

    trainer = rank_trainer(
        world, ExpertParallelStrategy(1, timeout=120.0), precision="32-true", callbacks=[Others()]
    )
    trainer.fit(module, loader(rank, world))
    return differences(before, [weight.detach() for weight in expert_weights(module)])


def test_frozen_weights_are_released_as_well_and_come_back_unchanged_exactly() -> None:
    assert run_ranks(_frozen, 2) == [[], []]
