"""Hooks that keep ranks together: through loaders of unequal length, signals and failures."""

import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_moe.parallel.collectives import ProcessMesh, gather_objects
from lightning_moe.strategy.agreement import (
    EndTogether,
    StopRequest,
    is_sized,
    largest_and_smallest,
    refuse_different,
    refuse_uneven,
)
from lightning_moe.strategy.launchers import ScriptLauncher
from lightning_moe.strategy.log_step import align_log_step
from lightning_moe.strategy.stopping import save_at_sigterm, say

_LAST_WORDS_S: Final = 3.0


class JointStages(DDPStrategy):
    """Ranks that begin and end together, for the strategy that owns the attributes below."""

    mesh: ProcessMesh | None
    _stop: StopRequest
    _predict_batches: list[tuple[int, int]]
    _stopped_by: int = 0

    def process_dataloader(self, dataloader: object) -> object:
        """Loaders of unknown length end together."""
        if self.mesh is None or self.mesh.world.size == 1 or is_sized(dataloader):
            return dataloader
        assert isinstance(dataloader, Iterable)
        return EndTogether(dataloader, self.mesh.world, self.root_device)

    def _refuse_uneven(self, num_batches: int | float | list[int | float], what: str) -> None:
        if self.mesh is not None and self.mesh.world.size > 1:
            numbers = num_batches if isinstance(num_batches, list) else [num_batches]
            refuse_uneven(numbers, self.mesh.world, self.root_device, what)

    def on_train_start(self) -> None:
        """Check that epochs are equally long; from here on signals to stop wait for the end of a step."""
        super().on_train_start()
        if self.mesh is not None and self.mesh.world.size > 1:
            refuse_different(gather_objects(self._common_options()))
        self._refuse_uneven(self._trainer.num_training_batches, "train")
        environment = self._trainer.strategy.cluster_environment
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        requeue = [environment.requeue_signal or signal.SIGUSR1] if requeues else []
        self._stop.install([signal.SIGTERM, *requeue])

    def _common_options(self) -> dict[str, object]:
        trainer = self._trainer
        names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
        options: dict[str, object] = {f"trainer.{name}": getattr(trainer, name) for name in names}
        for i, optimizer in enumerate(trainer.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                options |= {
                    f"{key} of optimizer {i}, group {j},": value
                    for key, value in group.items()
                    if isinstance(value, int | float)
                }
        return options

    def on_validation_start(self) -> None:
        """Check that all ranks have equally many batches."""
        trainer = self._trainer
        numbers = (
            trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )
        self._refuse_uneven(numbers, "val")

    def on_test_start(self) -> None:
        """Check that all ranks have equally many batches."""
        self._refuse_uneven(self._trainer.num_test_batches, "test")

    def on_predict_start(self) -> None:
        """Find out how many batches each rank has: Lightning's sampler leaves some ranks with fewer."""
        self._predict_batches = []
        if self.mesh is None or self.mesh.world.size == 1:
            return
        for number in self._trainer.num_predict_batches:
            largest, smallest = largest_and_smallest(
                min(float(number), 1e18), self.mesh.world, self.root_device
            )
            if largest and not smallest:
                raise RuntimeError(
                    f"predict gives {largest:.0f} batches to one rank and none to another; use fewer ranks, smaller "
                    "batches or more samples"
                )
            if number:
                self._predict_batches.append((int(min(number, 1e18)), int(largest)))

    def predict_step(self, *args: Any, **kwargs: Any) -> object:
        """After its last batch a rank repeats that one, for the ranks that still need its experts."""
        prediction = super().predict_step(*args, **kwargs)
        if self._predict_batches:
            # Loaders come one after the other; a user's step need not take the batch's number, so count.
            left, largest = self._predict_batches[0]
            self._predict_batches[0] = (left - 1, largest - 1)
            if left == 1:
                for _ in range(largest - 1):
                    super().predict_step(*args, **kwargs)
                del self._predict_batches[0]
        return prediction

    def batch_to_device(
        self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> object:
        """The first that the strategy sees of a batch: what it logs is to come at the right step."""
        if self._trainer.training:
            align_log_step(self._trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Before the last micro-batch of a step, ask whether any rank was told to stop: then all stop after it."""
        trainer = self._trainer
        if self.mesh is None:
            return
        if batch_idx == 0:
            self._refuse_uneven(trainer.num_training_batches, "train")
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self._stopped_by = self._stop.agreed(self.mesh.world, self.root_device)
        if self._stopped_by:
            # Lightning raises SIGTERMException on all ranks once the batch is done.
            trainer._signal_connector.received_sigterm = True

    def on_exception(self, exception: BaseException) -> None:
        """Save if all ranks stop together; else say which rank failed first, and don't wait for the others."""
        launcher = self._launcher
        children = launcher.release_children() if isinstance(launcher, ScriptLauncher) else []
        if isinstance(exception, SIGTERMException):
            self._save_and_stop(exception)
            return
        if self.lightning_module is None or self.lightning_module._trainer is None:
            # The process that spawned the ranks: they have said what happened.
            return
        trainer = self._trainer
        say(
            f"[rank {self.global_rank}] {type(exception).__name__} at step {trainer.global_step}: {exception}"
        )
        # Children that failed first still have to say so; those that wait for this rank would wait in vain.
        wait_s = 0.0 if isinstance(exception, KeyboardInterrupt) else _LAST_WORDS_S
        _end_children(children, wait_s)

    def _save_and_stop(self, exception: SIGTERMException) -> None:
        trainer = self._trainer
        signal_number = self._stopped_by or signal.SIGTERM
        exception.code = 128 + signal_number
        if signal_number != signal.SIGTERM:
            # Saves, and asks SLURM to start the job again.
            trainer._signal_connector._slurm_sigusr_handler_fn(signal_number, None)
            return
        save_at_sigterm(trainer)

    @property
    def _trainer(self) -> Any:  # noqa: ANN401 - the Trainer sets many attributes dynamically
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _end_children(children: list[subprocess.Popen[bytes]], wait_s: float) -> None:
    """Give scripts that this process has started a moment to end, say how they ended, and end the others."""
    deadline = time.monotonic() + wait_s
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0))
    for local_rank, child in enumerate(children, start=1):
        code = child.poll()
        if code is None:
            child.kill()
            child.wait()
            say(f"[local rank {local_rank}] did not end by itself: killed")
        elif code < 0:
            say(f"[local rank {local_rank}] was ended by {signal.Signals(-code).name}")
