"""torchmetrics for language models with experts."""

from lightning_moe.metrics.token_mean import TokenMean

__all__ = ["TokenMean"]
