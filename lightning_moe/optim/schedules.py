"""Learning-rate schedules: the formula, and the scheduler that a Trainer steps."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_moe.config import OptimConfig


def build_schedule(
    optimizer: Optimizer,
    config: OptimConfig,
    *,
    run_steps: Callable[[], float],
    tokens_seen: Callable[[], int],
) -> LambdaLR:
    """The scheduler of `optimizer`, to be stepped once per optimizer step.

    Args:
        optimizer: holds the peak learning rate of each group.
        config: the schedule.
        run_steps: optimizer steps of the whole run, infinite where unknown; called where the schedule ends with it.
        tokens_seen: tokens of all steps so far; called where `config.unit` is tokens.
    """
    total = config.total
    if total is None and config.schedule != "constant":
        steps = run_steps()
        total = None if math.isinf(steps) else int(steps)

    def factor(steps: int) -> float:
        done = steps if config.unit == "steps" else tokens_seen()
        return learning_rate_factor(config, done, total)

    return LambdaLR(optimizer, factor)


def learning_rate_factor(config: OptimConfig, done: int, total: int | None) -> float:
    """Factor on the peak learning rate for the optimizer step after `done` steps (or tokens).

    A warm-up of W steps gives 1/W, 2/W, .. 1. In tokens it gives done/W, so that its first step is taken at zero.
    Past `total` the factor stays at its last value.

    Args:
        config: the schedule; its lengths are in `config.unit`.
        done: steps or tokens before this step.
        total: end of the schedule; not read by `constant`.

    Raises:
        ValueError: if the schedule needs an end and has none, or its phases don't fit into it.

    Source: WSD and its 1-sqrt decay: MiniCPM, arXiv:2404.06395; Haegele et al., arXiv:2405.18392.
    """
    warmed = done + 1 if config.unit == "steps" else done
    if warmed < config.warmup:
        return warmed / config.warmup
    if config.schedule == "constant":
        return 1.0
    if total is None:
        raise ValueError(
            f"optim.schedule={config.schedule} needs an end; set optim.total or trainer.max_steps"
        )
    decay = config.decay if config.schedule == "wsd" else total - config.warmup
    if config.warmup + decay > total:
        raise ValueError(
            f"optim.warmup={config.warmup} and optim.decay={decay} don't fit into {total} {config.unit}; "
            "shorten them or train longer"
        )
    passed = min(max(done - (total - decay), 0) / max(decay, 1), 1.0)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * _remaining(config, passed)


def _remaining(config: OptimConfig, passed: float) -> float:
    """1 at the start of the decay, 0 at its end."""
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * passed)) / 2
    return 1 - math.sqrt(passed) if config.decay_shape == "1-sqrt" else 1 - passed
