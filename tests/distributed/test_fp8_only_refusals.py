"""Training without the weights beside their codes: what is refused, and fits that break off."""

import re
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy, MoEConfig, MoEPrecision
from lightning_moe.nn import MoE
from lightning_moe.precision import ReleasedParameter
from tests.kit.fp8_only_runs import expert_weights, module_in
from tests.kit.rank_trainers import (
    Module,
    join_lightning,
    loader,
    rank_trainer,
)
from tests.kit.ranks import run_ranks


class _Adafactor(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


def _optimizer_error(rank: int, world: int) -> str:
    join_lightning(rank, world)
    trainer = rank_trainer(world, ExpertParallelStrategy(1), precision="32-true")
    with pytest.raises(ValueError, match="Adafactor updates a matrix differently") as error:
        trainer.fit(module_in("only", kind=_Adafactor), loader(rank, world))
    return str(error.value)


def test_who_keeps_no_weights_is_not_told_to_do_without_masters_alone() -> None:
    (message,) = run_ranks(_optimizer_error, 1)
    assert "strategy.distributed_optimizer=False and model.moe.fp8.fp8_only=false" in message


def _error(rank: int, world: int, options: dict[str, Any], strategy: dict[str, Any]) -> str:
    join_lightning(rank, world)
    if "callbacks" in options:
        kind, arguments = options["callbacks"]
        options = {"callbacks": kind(*arguments)}
    module = module_in("only")
    trainer = rank_trainer(
        world, ExpertParallelStrategy(**strategy), **({"precision": "32-true"} | options)
    )
    with pytest.raises(ValueError, match=r"model\.moe\.fp8\.fp8_only=True") as error:
        trainer.fit(module, loader(rank, world))
    assert not any(type(p) is ReleasedParameter for p in expert_weights(module))
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "options", "strategy", "message"),
    [
        (2, {}, {"distributed_optimizer": False}, "strategy.distributed_optimizer=False switches"),
        (1, {}, {"distributed_optimizer": False}, "strategy.distributed_optimizer=False switches"),
        (1, {"precision": "bf16-true"}, {}, "torch.bfloat16 (trainer.precision) has none"),
        (1, {"callbacks": (EMAWeightAveraging, ())}, {}, "EMAWeightAveraging averages weights"),
        (
            1,
            {"callbacks": (StochasticWeightAveraging, (0.01,))},
            {},
            "StochasticWeightAveraging aver",
        ),
    ],
)
def test_what_needs_weights_or_leaves_no_master_is_refused_in_setup_on_all_ranks(
    world: int, options: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    for error in run_ranks(_error, world, options, strategy):
        assert message in error
        assert "or set model.moe.fp8.fp8_only=false" in error


@pytest.mark.filterwarnings("ignore")  # of Lightning, about missing loaders
def test_another_strategy_is_refused_before_the_first_batch() -> None:
    trainer = rank_trainer(1, "auto", precision="32-true")
    with pytest.raises(ValueError, match=r"fp8_only=True needs strategy=ExpertParallelStrategy"):
        trainer.fit(module_in("only"), loader(0, 1))


class _Own(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(32, MoEConfig(num_experts=2, hidden_size=32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.moe(batch)[0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_your_own_is_told_at_its_first_step_that_its_strategy_keeps_weights() -> None:
    plugin = MoEPrecision("mxfp8", base="32-true", emulate=True, fp8_only=True)
    trainer = rank_trainer(1, "auto", precision=None, plugins=[plugin])
    with pytest.raises(RuntimeError, match=r"fp8_only=True trains inside of Trainer\.fit with Exp"):
        trainer.fit(_Own(), DataLoader(torch.ones(4, 32), batch_size=2))


class _Breaks(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.trainer.global_step == 2:
            raise ZeroDivisionError("broken")


def _break(rank: int, world: int) -> list[str]:
    join_lightning(rank, world)
    module = module_in("only", kind=_Breaks)
    trainer = rank_trainer(
        world, ExpertParallelStrategy(1, timeout=120.0), precision="32-true", max_steps=3
    )
    with pytest.raises(ZeroDivisionError, match="broken"):
        trainer.fit(module, loader(rank, world))
    try:
        return [str(weight.isfinite().all().item()) for weight in expert_weights(module)]
    except RuntimeError as error:
        return [str(error)]


def test_after_a_fit_that_broke_off_weights_are_back_or_said_to_be_gone() -> None:
    assert run_ranks(_break, 1) == [["True", "True"]]
    for (message,) in run_ranks(_break, 2):
        assert "after a fit that broke off, build the module anew" in message


def _diverge(rank: int, world: int) -> str:
    join_lightning(rank, world)

    class Diverging(Module):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            masters = self.trainer.optimizers[0].param_groups[0]["params"]
            for (name, _), master in zip(self.named_parameters(), masters, strict=True):
                if name.endswith("experts.w_down"):
                    master.data.fill_(torch.inf)

    module = module_in("only", kind=Diverging)
    module.optim = replace(module.optim, max_skipped_steps=0)
    trainer = rank_trainer(
        world,
        ExpertParallelStrategy(1, timeout=120.0),
        precision="32-true",
        gradient_clip_val=None,
    )
    with pytest.raises(RuntimeError, match="non-finite gradients") as error:
        trainer.fit(module, loader(rank, world))
    return str(error.value)


def test_the_guard_still_names_weights_that_are_not_finite() -> None:
    (message,) = run_ranks(_diverge, 1)
    assert re.search(r"; non-finite weights: [\w.]+\.experts\.w_down\)", message)
