"""`lightning-moe train`: compose, check, fit, validate, report."""

from collections.abc import Sequence

from omegaconf import DictConfig

from lightning_moe.cli.hydra_job import run_job
from lightning_moe.cli.threads import wait_without_spinning


def run(arguments: Sequence[str]) -> int:
    """Train with Hydra's `arguments`; returns the exit code."""
    return run_job("train", arguments, _train)


def _train(config: DictConfig) -> float:
    wait_without_spinning()
    # torch and Lightning take seconds to import; help, typos and tab completion need none of it.
    from lightning_moe.cli.training import train

    return train(config)
