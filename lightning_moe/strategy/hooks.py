"""Hooks of the strategy that hand over to one object each."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.checkpoint.checkpoints import Checkpoints
from lightning_moe.optim.released import ReleasedWeights
from lightning_moe.parallel.clip import GradientNorm
from lightning_moe.parallel.collectives import ProcessMesh
from lightning_moe.strategy.joint_ends import JointEnds
from lightning_moe.strategy.launchers import ProcessLauncher, ScriptLauncher, end_children
from lightning_moe.strategy.log_step import align_log_step
from lightning_moe.strategy.stop_signal import save_and_stop, say

T = TypeVar("T")


class RankHooks(DDPStrategy):
    """Ranks that begin, end and save together.

    Where several objects take part in a hook, `ExpertParallelStrategy` calls them in their order; no hook is in both.

    Attributes:
        mesh, ends: the ranks, and what keeps them together; from `setup_environment` on.
        checkpoints: from `setup` on.
        norm: of gradients; from `setup` of fit on.
        released: weights that only the optimizer's masters keep while fit runs.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mesh: ProcessMesh | None = None
        self.ends: JointEnds | None = None
        self.checkpoints: Checkpoints | None = None
        self.released = ReleasedWeights({}, None)
        self.norm: GradientNorm | None = None

    # ---- ranks -----------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = ProcessLauncher(self, start_method=self._start_method)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, except where they won't come."""
        if self.failing is None:
            super().barrier(name)

    @override
    def reduce(
        self,
        tensor: Tensor,
        group: object = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> Tensor:
        """As in `DDPStrategy`, and noted in the ledger; one rank sends nothing."""
        if self.mesh is not None:
            if self.mesh.world.size == 1:
                return tensor
            self.mesh.ledger.enter("all_reduce", "world", tensor)
        return super().reduce(tensor, group, reduce_op)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Save if all ranks stop together; else say which rank failed first, and don't wait for the others."""
        launcher = self._launcher
        children = launcher.release_children() if isinstance(launcher, ScriptLauncher) else []
        if isinstance(exception, SIGTERMException):
            stopped_by = self.ends.stopped_by if self.ends is not None else 0
            save_and_stop(self._trainer, exception, stopped_by or signal.SIGTERM)
        elif self._in_a_rank:  # else ranks have said what happened
            step = self._trainer.global_step
            say(f"[rank {self.global_rank}] {type(exception).__name__} at step {step}: {exception}")
            end_children(children, at_once=isinstance(exception, KeyboardInterrupt))

    # ---- gradients -------------------------------------------------------------------------------------------

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of `optimizer` over all ranks, each element once; equal everywhere."""
        return there(self.norm).of(optimizer, norm_type)

    def clip_grad_norm(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm over all ranks; gives the norm before."""
        return there(self.norm).clip_(optimizer, max_norm, norm_type)

    # ---- stages ----------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Loaders of unknown length end on all ranks together."""
        return there(self.ends).loader(dataloader)

    @override
    def on_validation_start(self) -> None:
        """Check that all ranks have equally many batches."""
        trainer = self._trainer
        numbers = (
            trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        )
        there(self.ends).refuse_uneven(numbers, "val")

    @override
    def on_test_start(self) -> None:
        """Check that all ranks have equally many batches."""
        there(self.ends).refuse_uneven(self._trainer.num_test_batches, "test")

    @override
    def on_predict_start(self) -> None:
        """Find out how many batches each rank has."""
        there(self.ends).begin_predict(self._trainer.num_predict_batches)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> object:
        """After its last batch a rank repeats that one, for the ranks that still need its experts."""
        prediction = super().predict_step(*args, **kwargs)
        for _ in range(there(self.ends).num_repeats()):
            super().predict_step(*args, **kwargs)
        return prediction

    @override
    def batch_to_device(
        self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> object:
        """The first that the strategy sees of a batch: what it logs is to come at the right step."""
        if self._trainer.training:
            align_log_step(self._trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ---- checkpoints -----------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into tensors that are spread already."""
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Local weights by name; see `ReleasedWeights.state_dict` for which of them all ranks must call it."""
        return self.released.state_dict(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State and groups of this rank, by parameter name."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return there(self.checkpoints).optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: object = None,
    ) -> None:
        """Write a checkpoint folder; all ranks must call it.

        A rank that is failing says so and writes nothing: the others don't come, and waiting for them would hide the
        error that counts.
        """
        if (error := self.failing) is not None:
            say(
                f"no checkpoint at {filepath}: saving needs all ranks, and this one was stopped by "
                f"{type(error).__name__}"
            )
            return
        if storage_options is not None:
            raise TypeError("ExpertParallelStrategy saves folders, which take no storage_options")
        there(self.checkpoints).save(checkpoint, str(filepath))

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """This rank's part of a checkpoint (`Checkpoints.load`)."""
        return there(self.checkpoints).load(
            str(checkpoint_path), weights_only=weights_only is not False
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Local weights into the module, and into the optimizers' masters."""
        with self.released.brought_back():
            there(self.checkpoints).load_weights(checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Local parts of moments and masters, and the groups' options, into the optimizers."""
        there(self.checkpoints).load_optimizers(checkpoint["optimizer_states"])

    # ---- what hooks need -------------------------------------------------------------------------------------

    @property
    def failing(self) -> BaseException | None:
        """What has stopped this rank, while it cleans up after it: the other ranks are elsewhere."""
        error = sys.exc_info()[1]
        together = isinstance(error, SIGTERMException) or not self._in_a_rank
        return None if together or not self._trainer.interrupted else error

    @property
    def _in_a_rank(self) -> bool:
        """Not so in the process that only spawns the ranks."""
        return self.lightning_module is not None and self.lightning_module._trainer is not None

    @property
    def _module(self) -> L.LightningModule:
        return there(self.lightning_module)

    @property
    def _trainer(self) -> Any:  # noqa: ANN401 - the Trainer sets many attributes dynamically
        return self._module.trainer


def there(part: T | None) -> T:
    """What the Trainer has built by the time that its hooks ask for it.

    Raises:
        RuntimeError: if it is asked for earlier.
    """
    if part is None:
        raise RuntimeError("ExpertParallelStrategy has this once the Trainer has set it up")
    return part
