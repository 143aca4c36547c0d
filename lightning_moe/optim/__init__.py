"""Parameter groups by role, learning-rate schedules, and the sums of one optimizer step."""

from lightning_moe.optim.balance_check import assert_balance_invariant
from lightning_moe.optim.balance_scope import step_router_losses
from lightning_moe.optim.groups import build_optimizer, parameter_groups
from lightning_moe.optim.schedules import learning_rate_factor
from lightning_moe.optim.step_window import StepStatistics, StepWindow, close_window, window_of

__all__ = [
    "StepStatistics",
    "StepWindow",
    "assert_balance_invariant",
    "build_optimizer",
    "close_window",
    "learning_rate_factor",
    "parameter_groups",
    "step_router_losses",
    "window_of",
]
