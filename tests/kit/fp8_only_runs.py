"""Modules that keep the weights of their experts beside the codes, or don't, and how they are compared."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe import FP8Config, MoEConfig, MoEModule
from lightning_moe.nn import moe_layers
from tests.kit.rank_trainers import Module, config

MODES = {
    "kept": ("mxfp8", FP8Config(emulate=True)),
    "only": ("mxfp8", FP8Config(emulate=True, fp8_only=True)),
    "float32": ("auto", FP8Config()),
}


def module_in(mode: str, kind: type[MoEModule] = Module) -> MoEModule:
    """The same weights in each of `MODES`."""
    backend, fp8 = MODES[mode]
    torch.manual_seed(0)
    whole = config()
    assert isinstance(whole.moe, MoEConfig)
    return kind(replace(whole, moe=replace(whole.moe, backend=backend, fp8=fp8)))


def expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """Those of the routed experts."""
    layers = moe_layers(module)
    return [p for layer in layers for p in layer.experts.parameters()]


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where two nestings of tensors and plain values aren't equal bit for bit."""
    if isinstance(ours, Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if same else [at]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{at}: {ours.keys() ^ theirs.keys()}"]
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{at}/{key}")]
    if isinstance(ours, list | tuple):
        return [
            d
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for d in differences(*pair, f"{at}/{i}")
        ]
    return [] if ours == theirs else [at]
