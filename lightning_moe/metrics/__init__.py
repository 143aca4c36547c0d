"""torchmetrics for language models with experts, and what runs record of their routing."""

from lightning_moe.metrics.expert_load import BatchMaxVio, ExpertLoad
from lightning_moe.metrics.router import RouterBalance, RouterConfidence
from lightning_moe.metrics.routing_history import RoutingHistory
from lightning_moe.metrics.token_mean import TokenMean

__all__ = [
    "BatchMaxVio",
    "ExpertLoad",
    "RouterBalance",
    "RouterConfidence",
    "RoutingHistory",
    "TokenMean",
]
