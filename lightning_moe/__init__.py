"""MoE training for PyTorch Lightning: experts stay on their ranks, tokens travel."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from lightning_moe.config import (
    AttentionConfig,
    FP8Config,
    LatentMoEConfig,
    LayerConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.config.data import DataConfig
from lightning_moe.registration import register_strategies

if TYPE_CHECKING:
    from lightning_moe.checkpoint.whole import load_weights
    from lightning_moe.data import TokenBatch, TokenDataModule
    from lightning_moe.module import MoEModule
    from lightning_moe.parallel import AllToAllDispatch, StaticDispatch
    from lightning_moe.step import (
        StepHooks,
        StepWindow,
        assert_balance_invariant,
        close_window,
        step_router_losses,
    )
    from lightning_moe.strategy import ExpertParallelStrategy, MoEPrecision

__version__ = "0.1.0"

__all__ = [
    "AllToAllDispatch",
    "AttentionConfig",
    "DataConfig",
    "ExpertParallelStrategy",
    "FP8Config",
    "LatentMoEConfig",
    "LayerConfig",
    "MoEConfig",
    "MoEModule",
    "MoEPrecision",
    "OptimConfig",
    "RouterConfig",
    "SharedExpertConfig",
    "StaticDispatch",
    "StepHooks",
    "StepWindow",
    "TokenBatch",
    "TokenDataModule",
    "TransformerConfig",
    "assert_balance_invariant",
    "close_window",
    "load_weights",
    "step_router_losses",
]

# These import torch and Lightning, seconds that the command line's help should not take: loaded at first use.
_FIRST_USE: Final = {
    "AllToAllDispatch": "lightning_moe.parallel",
    "ExpertParallelStrategy": "lightning_moe.strategy",
    "MoEModule": "lightning_moe.module",
    "MoEPrecision": "lightning_moe.strategy",
    "StaticDispatch": "lightning_moe.parallel",
    "StepHooks": "lightning_moe.step",
    "StepWindow": "lightning_moe.step",
    "TokenBatch": "lightning_moe.data",
    "TokenDataModule": "lightning_moe.data",
    "assert_balance_invariant": "lightning_moe.step",
    "close_window": "lightning_moe.step",
    "load_weights": "lightning_moe.checkpoint.whole",
    "step_router_losses": "lightning_moe.step",
}


def __getattr__(name: str) -> object:
    if name not in _FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FIRST_USE[name]), name)


# `Trainer(strategy="expert_parallel")` works after `import lightning_moe` alone.
register_strategies()
