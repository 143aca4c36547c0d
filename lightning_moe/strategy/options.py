"""The strategy's options: what each may be, and which of them go together."""

from collections.abc import Iterable
from multiprocessing import get_all_start_methods
from typing import Any, Final

import lightning as L
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from lightning_moe.config.checks import (
    between,
    check_bools,
    check_choices,
    check_floats,
)
from lightning_moe.optim.released import ADVICE
from lightning_moe.parallel.transports import Transport

_START_METHODS: Final = ("popen", *get_all_start_methods())


# Wide enough for any use, and far from where clocks, sizes of messages and numbers of slots overflow.
_TIMEOUT_S: Final = between(1.0, 30 * 24 * 3600.0, "between 1 second and 30 days")
_BUCKET_MIB: Final = between(1e-6, 1e6, "between 1e-6 (one byte) and 1e6")

# What `DDPStrategy` takes and this strategy serves as well.
_LIGHTNING_OPTIONS: Final = frozenset(
    {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
    }
)


def check_options(
    lightning_options: dict[str, Any],
    *,
    timeout_s: float,
    bucket_mb: float,
    distributed_optimizer: bool,
    start_method: str,
) -> None:
    """Check each of these options of the strategy by itself.

    Raises:
        TypeError: for a value of the wrong type, and an option that `DDPStrategy` has and that would do nothing here.
        ValueError: for a value that can't work.
    """
    _refuse_unknown(lightning_options)
    check_floats("strategy", _TIMEOUT_S, timeout=timeout_s)
    check_floats("strategy", _BUCKET_MIB, bucket_mb=bucket_mb)
    check_bools("strategy", distributed_optimizer=distributed_optimizer)
    check_choices("strategy", _START_METHODS, start_method=start_method)


def _refuse_unknown(lightning_options: dict[str, Any]) -> None:
    if unknown := sorted(set(lightning_options) - _LIGHTNING_OPTIONS):
        raise TypeError(
            f"ExpertParallelStrategy has no option {unknown[0]!r}; DDP's own options have no effect here, since the "
            "module isn't wrapped in DistributedDataParallel"
        )


def refuse_mixed_float16(plugin: Precision, world: int) -> None:
    """Loss scaling skips steps, and each rank would skip others.

    Raises:
        ValueError: if `plugin` scales losses on several ranks.
    """
    if world > 1 and isinstance(plugin, MixedPrecision) and plugin.precision == "16-mixed":
        raise ValueError(
            "trainer.precision=16-mixed does not work with ExpertParallelStrategy on more than one rank: each "
            "rank would judge by its own gradients whether to skip a step; use bf16-mixed"
        )


def refuse_lbfgs(optimizers: Iterable[Optimizer], ep: int) -> None:
    """No optimizer may need more of a parameter than one rank of `ep` holds.

    Raises:
        ValueError: if one is LBFGS.
    """
    if ep > 1 and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS does not work with experts on several ranks: it needs inner products over all parameters; "
            "use an elementwise optimizer such as AdamW, or strategy.expert_parallel=1"
        )


def refuse_averaging(callbacks: Iterable[Callback]) -> None:
    """Weights that `fp8_only` drops can't be averaged.

    Raises:
        ValueError: if a callback averages weights.
    """
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages weights that model.moe.fp8.fp8_only=True doesn't keep; leave "
                f"the callback out, {ADVICE}"
            )


def refuse_single_files(plugin: CheckpointIO) -> None:
    """A plugin that saves single files would have no effect.

    Raises:
        ValueError: if it is another one than Lightning's default.
    """
    if type(plugin) is not TorchCheckpointIO:
        raise ValueError(
            f"{type(plugin).__name__} has no effect on ExpertParallelStrategy, which writes folders "
            "from all ranks; remove it from the Trainer's plugins"
        )


def sized_for_data(transport: Transport, trainer: L.Trainer) -> Transport:
    """The transport for micro-batches of batch_size x sequence_length tokens, if the training data tell both numbers.

    A data module has them itself or in its `config`; of a loader, the data set has the second.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        source = trainer.fit_loop._data_source.instance
        if isinstance(source, L.LightningDataModule | DataLoader):
            owners = source, getattr(source, "config", None), getattr(source, "dataset", None)
            rows, length = (
                next((size for o in owners if type(size := getattr(o, name, None)) is int), None)
                for name in ("batch_size", "sequence_length")
            )
            if rows is not None and length is not None:
                return transport.for_micro_batches(rows * length)
    return transport
