"""Subclasses of Lightning's own objects, for ranks that hold parts of the gradients."""

from collections.abc import Callable, Sequence
from copy import copy

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.parallel.reducer import GradientReducer


class ReducedOptimizer(LightningOptimizer):
    """What `self.optimizers()` gives in manual optimization; automatic optimization leaves nothing to drop."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.reducer: GradientReducer | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own, and drop what micro-batches that weren't reduced have left in the reducer."""
        self.optimizer.zero_grad(set_to_none)
        if self.reducer is not None:
            self.reducer.forget(self.optimizer)


def wrap_optimizers(
    optimizers: Sequence[Optimizer], strategy: Strategy, reducer: GradientReducer | None
) -> list[LightningOptimizer]:
    """Lightning's wrappers around optimizers, which know the reducer."""
    wrappers: list[LightningOptimizer] = []
    for optimizer in optimizers:
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        wrapper = ReducedOptimizer._to_lightning_optimizer(own, strategy)
        assert isinstance(wrapper, ReducedOptimizer)
        wrapper.reducer = reducer
        wrappers.append(wrapper)
    return wrappers


class _ClippingOverRanks(Precision):
    """A precision plugin whose clipping by norm is that of the strategy."""

    clip: Callable[[Optimizer, float], object]

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.clip(optimizer, clip_val)


def clipping_over_ranks(plugin: Precision, clip: Callable[[Optimizer, float], object]) -> Precision:
    """A copy of `plugin`, of a subclass with the same name, that clips gradients with `clip`.

    Lightning, and modules that clip by themselves, ask the plugin. Its name is where a checkpoint has its state.
    """
    kind = type(plugin)
    if not isinstance(plugin, _ClippingOverRanks):
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__}
        kind = type(kind.__name__, (_ClippingOverRanks, kind), names)
    wrapped = copy(plugin)
    wrapped.__class__ = kind
    assert isinstance(wrapped, _ClippingOverRanks)
    wrapped.clip = clip
    return wrapped
