"""Signals that stop a run: remembered until a step is done, then a checkpoint and the exit code."""

import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException


class StopRequest:
    """Remembers a signal until all ranks can stop together.

    Lightning's own handlers run collectives inside of the signal, wherever that hits; these set a flag.
    """

    def __init__(self) -> None:
        self.received = 0

    def install(self, signals: Iterable[int]) -> None:
        """Take over these signals until Lightning's teardown restores the handlers of before."""
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: object) -> None:
        self.received = number


def stop_signals(environment: object) -> list[int]:
    """The signals that stop a run in a cluster environment: SIGTERM, and SLURM's that asks to be started again."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return [signal.SIGTERM, environment.requeue_signal or signal.SIGUSR1]
    return [signal.SIGTERM]


def save_and_stop(trainer: Any, exception: SIGTERMException, number: int) -> None:  # noqa: ANN401 - dynamic attributes
    """Save after signal `number`, on all ranks together, and give the exception the exit code that shells use."""
    exception.code = 128 + number
    if number == signal.SIGTERM:
        save_at_sigterm(trainer)
    else:
        # Saves, and asks SLURM to start the job again.
        trainer._signal_connector._slurm_sigusr_handler_fn(number, None)


def save_at_sigterm(trainer: L.Trainer) -> None:
    """Save `sigterm.ckpt` in the Trainer's folder, on all ranks together, and write how to resume from it."""
    path = f"{trainer.default_root_dir}/sigterm.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    if trainer.is_global_zero:
        say(f"stopped by SIGTERM at step {trainer.global_step}; resume with ckpt_path={path}")


def say(message: str) -> None:
    """Straight to the screen: a log record may be filtered, or lost with a dying process."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
