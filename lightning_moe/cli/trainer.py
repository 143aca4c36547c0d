"""The Trainer of the options, and how a run ends that is told to stop."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from lightning_moe.cli.checkpoints import WholeFiles
from lightning_moe.cli.process import keep_freed_memory
from lightning_moe.strategy import ExpertParallelStrategy
from lightning_moe.strategy.stop_signal import StopRequest, save_at_sigterm


def prepare_process(config: DictConfig) -> None:
    """What comes before the first tensor: allocator and seeds."""
    if config.keep_freed_memory and config.trainer.accelerator == "cpu":
        keep_freed_memory()
    if config.seed is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)


def build_trainer(config: DictConfig, callbacks: Sequence[L.Callback] = ()) -> L.Trainer:
    """The Trainer of `trainer`, `strategy`, `callbacks` and `logger`, with further `callbacks`."""
    strategy = OmegaConf.select(config, "strategy", default="auto")
    own = _callbacks(config)
    enable_checkpointing = config.trainer.get("enable_checkpointing")
    if enable_checkpointing is None:
        # Without a callback that saves, Lightning would add one of its own.
        enable_checkpointing = any(isinstance(callback, Checkpoint) for callback in own)
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(strategy) if isinstance(strategy, DictConfig) else strategy,
        callbacks=[*own, *callbacks, StopAtSignal()],
        # False: none at all. Lightning would make one of its own from an empty list.
        logger=_instances(config, "logger") or False,
        enable_checkpointing=enable_checkpointing,
        _convert_="all",
    )
    is_plain = type(trainer.strategy.checkpoint_io) is TorchCheckpointIO
    if is_plain and not isinstance(trainer.strategy, ExpertParallelStrategy):
        trainer.strategy.checkpoint_io = WholeFiles()
    return trainer


def _callbacks(config: DictConfig) -> list[L.Callback]:
    """Those of the options that the Trainer's switches leave on; it refuses the others."""
    callbacks: list[L.Callback] = _instances(config, "callbacks")
    for switch, kind in (
        ("enable_progress_bar", LightningProgressBar),
        ("enable_checkpointing", Checkpoint),
    ):
        if config.trainer.get(switch) is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
    return callbacks


def _instances(config: DictConfig, group: str) -> list[Any]:
    """The objects of a group; none where it was taken away (`logger=null`, `~logger`)."""
    section = OmegaConf.select(config, group) or {}
    return [instantiate(entry, _convert_="all") for entry in section.values() if entry is not None]


class StopAtSignal(L.Callback):
    """After SIGTERM or Ctrl-C a fit finishes its step and saves `sigterm.ckpt`; exit code 143 or 130, as shells count.

    A second Ctrl-C ends it at once. `ExpertParallelStrategy` stops and saves on all ranks by itself; on several ranks
    of another strategy there is the exit code only: there, ranks don't agree on a step to stop at.
    """

    def __init__(self) -> None:
        self._stop = StopRequest()
        self._before_fit: Any = None
        self.was_interrupted = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on signals wait for the end of a step."""
        self.was_interrupted = False
        if trainer.world_size == 1 and not _stops_by_itself(trainer):
            self._stop.install([signal.SIGTERM])
        if saves_when_stopped(trainer) and threading.current_thread() is threading.main_thread():
            self._before_fit = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.was_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Whoever ends this fit at SIGTERM ends it now.
        signal.raise_signal(signal.SIGTERM)

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
        self._restore()
        if not isinstance(exception, SIGTERMException) or _stops_by_itself(trainer):
            return
        exception.code = 128 + signal.SIGTERM
        if saves_when_stopped(trainer) and trainer.state.fn == "fit":
            save_at_sigterm(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ctrl-C is again what it was before the fit."""
        self._restore()

    def _restore(self) -> None:
        if self._before_fit is not None:
            signal.signal(signal.SIGINT, self._before_fit)
            self._before_fit = None


def was_interrupted(trainer: L.Trainer) -> bool:
    """Whether Ctrl-C, and not SIGTERM, has stopped the last fit."""
    # The Trainer's callback connector gives it that attribute.
    every: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [one for one in every if isinstance(one, StopAtSignal)]
    return any(callback.was_interrupted for callback in callbacks)


def saves_when_stopped(trainer: L.Trainer) -> bool:
    """Whether a fit that a signal ends leaves a checkpoint and says how to resume."""
    return trainer.world_size == 1 or _stops_by_itself(trainer)


def _stops_by_itself(trainer: L.Trainer) -> bool:
    return isinstance(trainer.strategy, ExpertParallelStrategy)
