"""Names for `Trainer(strategy="...")`."""

from typing import Final

from lightning.pytorch.strategies import StrategyRegistry

from lightning_moe.strategy.expert_parallel import ExpertParallelStrategy

NAMES: Final = {
    "expert_parallel": "popen",
    "expert_parallel_spawn": "spawn",
    "expert_parallel_fork": "fork",
    "expert_parallel_notebook": "fork",
}


def register_strategies() -> None:
    """Let `Trainer(strategy="expert_parallel")` and its `_spawn`, `_fork` and `_notebook` variants work.

    Importing `lightning_moe` calls this; Lightning has no entry point for strategies. Calling it again is harmless.
    """
    for name, start_method in NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name,
                ExpertParallelStrategy,
                description="experts spread over ranks, dense parameters replicated, optimizer state sharded",
                start_method=start_method,
            )
