"""`lightning-moe evaluate`: the validation loss of a checkpoint."""

from collections.abc import Sequence

from omegaconf import DictConfig

from lightning_moe.cli.hydra_job import run_job
from lightning_moe.cli.threads import wait_without_spinning


def run(arguments: Sequence[str]) -> int:
    """Evaluate with Hydra's `arguments`; returns the exit code."""
    return run_job("evaluate", arguments, _evaluate)


def _evaluate(config: DictConfig) -> float:
    wait_without_spinning()
    # torch and Lightning take seconds to import; help, typos and tab completion need none of it.
    from lightning_moe.cli.evaluation import evaluate

    return evaluate(config)
