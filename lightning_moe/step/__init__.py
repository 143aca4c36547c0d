"""What the micro-batches of one optimizer step add up to."""

from lightning_moe.step.balance_scope import step_router_losses
from lightning_moe.step.invariance import assert_balance_invariant
from lightning_moe.step.window import StepStatistics, StepWindow, close_window, window_of

__all__ = [
    "StepStatistics",
    "StepWindow",
    "assert_balance_invariant",
    "close_window",
    "step_router_losses",
    "window_of",
]
