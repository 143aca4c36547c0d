"""The Lightning strategy that spreads experts over ranks."""

from lightning_moe.strategy.expert_parallel import ExpertParallelStrategy
from lightning_moe.strategy.precision import MoEPrecision
from lightning_moe.strategy.registry import register_strategies

__all__ = ["ExpertParallelStrategy", "MoEPrecision", "register_strategies"]

register_strategies()
