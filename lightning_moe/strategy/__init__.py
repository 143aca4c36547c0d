"""The Lightning strategy that spreads experts over ranks."""

from lightning_moe.strategy.expert_parallel import ExpertParallelStrategy
from lightning_moe.strategy.registry import register_strategies

__all__ = ["ExpertParallelStrategy", "register_strategies"]

register_strategies()
