"""Parameter groups by role and learning-rate schedules."""

from lightning_moe.optim.groups import build_optimizer, parameter_groups
from lightning_moe.optim.schedules import learning_rate_factor

__all__ = ["build_optimizer", "learning_rate_factor", "parameter_groups"]
