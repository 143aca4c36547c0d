"""The strategy's options: what each may be, which of them go together, and the dispatcher that they ask for."""

from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from typing import Any, Final, Literal, get_args

from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.optim import LBFGS, Optimizer

from lightning_moe.config import MoEConfig
from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    Interval,
    check_bools,
    check_choices,
    check_floats,
    check_ints,
    given,
)
from lightning_moe.nn import Dispatcher, LocalDispatcher
from lightning_moe.ops.capacity import Overflow
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.parallel.transports.all_to_all import AllToAllDispatcher
from lightning_moe.parallel.transports.static import StaticDispatcher

DispatcherName = Literal["all_to_all", "static"]

_START_METHODS: Final = ("popen", *get_all_start_methods())


def _between(lowest: float, highest: float, text: str) -> Interval:
    return Interval(text, lambda number: lowest <= number <= highest)


# Wide enough for any use, and far from where clocks, sizes of messages and numbers of slots overflow.
_TIMEOUT_S: Final = _between(1.0, 30 * 24 * 3600.0, "between 1 second and 30 days")
_BUCKET_MIB: Final = _between(1e-6, 1e6, "between 1e-6 (one byte) and 1e6")
_CAPACITY_FACTOR: Final = _between(1e-3, 1e4, "between 0.001 and 10000")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOptions:
    """How tokens get to their experts; the attributes are arguments of `ExpertParallelStrategy`.

    Raises:
        TypeError: for a number of the wrong type.
        ValueError: for a value that can't work, and for one that the chosen dispatcher doesn't read.
    """

    dispatcher: DispatcherName
    capacity_factor: float
    overflow: Overflow
    receive_limit: int | None

    def __post_init__(self) -> None:
        """Check every option, then that the dispatcher reads it."""
        check_choices("strategy", get_args(DispatcherName), dispatcher=self.dispatcher)
        check_choices("strategy", get_args(Overflow), overflow=self.overflow)
        check_floats("strategy", _CAPACITY_FACTOR, capacity_factor=self.capacity_factor)
        check_ints("strategy", AT_LEAST_ONE, **given(receive_limit=self.receive_limit))
        if self.dispatcher == "static" and self.receive_limit is not None:
            raise ValueError(
                f"strategy.receive_limit={self.receive_limit} has no effect with strategy.dispatcher=static, whose "
                "capacity_factor is the limit; unset it"
            )
        if self.dispatcher != "static" and (self.capacity_factor, self.overflow) != (
            1.25,
            "position",
        ):
            raise ValueError(
                f"strategy.capacity_factor={self.capacity_factor} and strategy.overflow={self.overflow} have no "
                "effect with strategy.dispatcher=all_to_all, which drops nothing; unset them or choose static"
            )

    def check_mesh(self, expert_parallel: int | str, ep: int) -> None:
        """Check that rows travel at all if there is a limit on them.

        Args:
            expert_parallel: as asked for.
            ep: ranks that share out the experts; what became of it.

        Raises:
            ValueError: if the limit has no effect.
        """
        if ep == 1 and self.receive_limit is not None:
            here = ", which is 1 here" if expert_parallel == "auto" else ""
            raise ValueError(
                f"strategy.receive_limit={self.receive_limit} has no effect with strategy.expert_parallel="
                f"{expert_parallel}{here}: each rank has all experts, and no row travels; unset it"
            )

    def build(self, group: AxisGroup, layer: MoEConfig) -> Dispatcher:
        """A dispatcher for one layer, whose experts the ranks of `group` share out."""
        if self.dispatcher == "static":
            return StaticDispatcher(
                group,
                num_experts=layer.num_experts,
                top_k=layer.router.top_k,
                capacity_factor=self.capacity_factor,
                overflow=self.overflow,
            )
        if group.size == 1:
            return LocalDispatcher()
        return AllToAllDispatcher(group, receive_limit=self.receive_limit)
