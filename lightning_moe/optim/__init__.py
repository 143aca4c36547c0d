"""Parameter groups by role and learning-rate schedules."""

from lightning_moe.optim.groups import build_optimizer, parameter_groups
from lightning_moe.optim.schedules import build_schedule, learning_rate_factor

__all__ = ["build_optimizer", "build_schedule", "learning_rate_factor", "parameter_groups"]
