"""SIGTERM without `ExpertParallelStrategy`, which has its own way: the same ending on one process."""

import signal

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_moe.strategy import ExpertParallelStrategy
from lightning_moe.strategy.stop_signal import StopRequest, save_at_sigterm


class StopAtSigterm(L.Callback):
    """After SIGTERM a fit on one process finishes its step and saves `sigterm.ckpt`; exit code 143, as shells count.

    On several ranks of another strategy it gives the exit code only: there, ranks don't agree on a step to stop at.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on the signal waits for the end of a step."""
        if trainer.world_size == 1 and not _has_its_own_way(trainer):
            self._stop.install([signal.SIGTERM])

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """The last micro-batch of a step may be the last of the run."""
        if self._stop.received and not trainer.fit_loop.epoch_loop._should_accumulate():
            # Lightning raises SIGTERMException once the batch is done.
            trainer._signal_connector.received_sigterm = True

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save, and choose the exit code: Lightning's exception has none."""
        if not isinstance(exception, SIGTERMException) or _has_its_own_way(trainer):
            return
        exception.code = 128 + signal.SIGTERM
        if saves_at_sigterm(trainer) and trainer.state.fn == "fit":
            save_at_sigterm(trainer)


def saves_at_sigterm(trainer: L.Trainer) -> bool:
    """Whether a fit that SIGTERM ends has left a checkpoint and said how to resume."""
    return trainer.world_size == 1 or _has_its_own_way(trainer)


def _has_its_own_way(trainer: L.Trainer) -> bool:
    return isinstance(trainer.strategy, ExpertParallelStrategy)
