"""Subclasses of Lightning's own objects keep their names and leave the originals alone."""

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_moe import MoEConfig, MoEPrecision
from lightning_moe.nn import MoE
from lightning_moe.strategy.expert_parallel import ExpertParallelStrategy
from lightning_moe.strategy.hooks import RankHooks
from lightning_moe.strategy.wrappers import clipping_over_ranks


def test_only_the_copy_of_a_precision_plugin_clips_over_ranks() -> None:
    clipped: list[float] = []

    def clip(_: Optimizer, limit: float) -> None:
        clipped.append(limit)

    plain = MixedPrecision("bf16-mixed", "cpu")
    plugin = clipping_over_ranks(clipping_over_ranks(plain, lambda *_: None), clip)
    assert isinstance(plugin, MixedPrecision)
    assert type(plugin).__qualname__ == "MixedPrecision"
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.0, 3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plugin.clip_gradients(optimizer, 0.5)
    assert clipped == [0.5]
    assert parameter.grad.tolist() == [0.0, 3.0, 4.0]
    plain.clip_gradients(optimizer, 0.5)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.0, 0.3, 0.4]))


def test_the_copy_of_our_own_plugin_converts_and_restores_the_experts_of_its_module() -> None:
    plugin = clipping_over_ranks(MoEPrecision("mxfp8", "32-true", emulate=True), lambda *_: None)
    layer = MoE(32, MoEConfig(num_experts=2, hidden_size=32))
    plugin.convert_module(layer)
    assert layer.experts.backend.name == "mxfp8"
    plugin.teardown()
    assert layer.experts.backend.name == "auto"


def test_no_hook_hides_another_of_the_strategys_own() -> None:
    own = {name for name in vars(ExpertParallelStrategy) if not name.startswith("__")}
    assert own & set(vars(RankHooks)) <= {"_abc_impl"}
