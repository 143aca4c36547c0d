"""The Lightning strategy that spreads experts over ranks."""

from lightning_moe.strategy.expert_parallel import ExpertParallelStrategy
from lightning_moe.strategy.precision import MoEPrecision

__all__ = ["ExpertParallelStrategy", "MoEPrecision"]
