"""MoE training for PyTorch Lightning: experts stay on their ranks, tokens travel."""

from lightning_moe.config import (
    AttentionConfig,
    LatentMoEConfig,
    LayerConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.config.data import DataConfig
from lightning_moe.data import TokenBatch, TokenDataModule
from lightning_moe.module import MoEModule
from lightning_moe.optim import StepWindow

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "DataConfig",
    "LatentMoEConfig",
    "LayerConfig",
    "MoEConfig",
    "MoEModule",
    "OptimConfig",
    "RouterConfig",
    "SharedExpertConfig",
    "StepWindow",
    "TokenBatch",
    "TokenDataModule",
    "TransformerConfig",
]
