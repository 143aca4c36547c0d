"""What the micro-batches of one optimizer step add up to."""

from lightning_moe.step.balance_counts import step_router_losses
from lightning_moe.step.hooks import StepHooks, begin_steps
from lightning_moe.step.invariance_check import assert_balance_invariant
from lightning_moe.step.sums import StepStatistics
from lightning_moe.step.window import StepWindow, close_window, closed_step, window_of

__all__ = [
    "StepHooks",
    "StepStatistics",
    "StepWindow",
    "assert_balance_invariant",
    "begin_steps",
    "close_window",
    "closed_step",
    "step_router_losses",
    "window_of",
]
