"""Ranks that were built differently are told so before they train, all of them and by the option's name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_moe import FP8Config, MoEPrecision
from tests.kit.rank_runs import Recorded, batches, config, fit, parallel
from tests.kit.ranks import run_ranks

EMULATED = FP8Config(emulate=True)
MXFP8: dict[str, Any] = {"backend": "mxfp8", "fp8": EMULATED}
# By how an error begins: options of the MoE layers, the plugin and the strategy, on the first and on the second rank.
DIFFERENCES: dict[str, list[dict[str, dict[str, Any]]]] = {
    "model.blocks.0.feed_forward: model.moe.backend is mxfp8 on rank 0 and auto on rank 1; all ranks": [
        {"layer": MXFP8},
        {},
    ],
    "model.blocks.0.feed_forward: model.moe.fp8.scale_mode is rceil on rank 0 and floor on rank 1;": [
        {"layer": MXFP8},
        {"layer": MXFP8 | {"fp8": replace(EMULATED, scale_mode="floor")}},
    ],
    "model.blocks.0.feed_forward: model.moe.hidden_size is 64 on rank 0 and 32 on rank 1;": [
        {"layer": {"hidden_size": 64}},
        {"layer": {"hidden_size": 32}},
    ],
    "MoEPrecision.fp8_only is True on rank 0 and False on rank 1;": [
        {"plugin": {"experts": "mxfp8", "emulate": True, "fp8_only": True}},
        {"plugin": {"experts": "mxfp8", "emulate": True}},
    ],
    "MoEPrecision linears.name is mxfp8 on rank 0 and fp8_rowwise on rank 1;": [
        {"plugin": {"linears": "mxfp8", "emulate": True}},
        {"plugin": {"linears": "fp8_rowwise", "emulate": True}},
    ],
    "trainer.precision is bf16-mixed by MoEPrecision on rank 0 and 32-true by Precision on rank 1": [
        {"plugin": {"experts": "mxfp8", "emulate": True}},
        {},
    ],
    "strategy.dispatcher is StaticDispatch on rank 0 and AllToAllDispatch on rank 1;": [
        {"strategy": {"dispatcher": "static"}},
        {},
    ],
    "strategy.bucket_mb is 25.0 on rank 0 and 1.0 on rank 1;": [
        {},
        {"strategy": {"bucket_mb": 1.0}},
    ],
}


def _told(rank: int, world: int) -> list[tuple[str, int]]:
    """The error of each fit, and how many steps came before it."""
    return [_error(rank, world, **by_rank[rank]) for by_rank in DIFFERENCES.values()]


def _error(
    rank: int,
    world: int,
    layer: dict[str, Any] | None = None,
    plugin: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
) -> tuple[str, int]:
    model = replace(config(), d_model=32)
    model = replace(model, moe=replace(model.moe, **(layer or {})))
    module = Recorded(model, torch.optim.AdamW)
    precision: dict[str, Any] = {"precision": "32-true"}
    if plugin is not None:
        precision = {"precision": None, "plugins": [MoEPrecision(**plugin)]}
    data = batches(rank, world, steps=1)
    with pytest.raises(ValueError, match="on rank 0 and") as error:
        fit(rank, world, module, data, strategy=parallel(2, **(strategy or {})), **precision)
    return str(error.value), len(module.losses)


def test_ranks_that_were_built_differently_are_refused_on_all_ranks_before_training() -> None:
    first, second = run_ranks(_told, 2, timeout_s=120)
    assert first == second
    for (message, num_steps), beginning in zip(first, DIFFERENCES, strict=True):
        assert message.startswith(beginning)
        assert num_steps == 0
