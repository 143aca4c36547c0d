"""Frozen configs of model and optimizer, checked on construction; standard library only."""

from lightning_moe.config.build import from_mapping, to_mapping
from lightning_moe.config.counting import NormPlacement
from lightning_moe.config.fp8 import (
    FP8_BACKENDS,
    ExpertBackendName,
    FP8Config,
    LinearFormat,
    ScaleMode,
)
from lightning_moe.config.layers import (
    AttentionBackend,
    AttentionConfig,
    Compile,
    DenseConfig,
    LayerConfig,
    LayerSpec,
    QkNorm,
    Recompute,
)
from lightning_moe.config.model import LayerOverrides, TransformerConfig
from lightning_moe.config.moe import (
    Activation,
    LatentMoEConfig,
    LatentNorm,
    MoEConfig,
    SharedActivation,
    SharedExpertConfig,
)
from lightning_moe.config.optim import DecayShape, OptimConfig, Schedule, ScheduleUnit
from lightning_moe.config.presets import PRESETS
from lightning_moe.config.router import (
    BALANCE_INVARIANCE,
    BalanceScope,
    GatingFunction,
    OverLayers,
    RouterConfig,
)

__all__ = [
    "BALANCE_INVARIANCE",
    "FP8_BACKENDS",
    "PRESETS",
    "Activation",
    "AttentionBackend",
    "AttentionConfig",
    "BalanceScope",
    "Compile",
    "DecayShape",
    "DenseConfig",
    "ExpertBackendName",
    "FP8Config",
    "GatingFunction",
    "LatentMoEConfig",
    "LatentNorm",
    "LayerConfig",
    "LayerOverrides",
    "LayerSpec",
    "LinearFormat",
    "MoEConfig",
    "NormPlacement",
    "OptimConfig",
    "OverLayers",
    "QkNorm",
    "Recompute",
    "RouterConfig",
    "ScaleMode",
    "Schedule",
    "ScheduleUnit",
    "SharedActivation",
    "SharedExpertConfig",
    "TransformerConfig",
    "from_mapping",
    "to_mapping",
]
