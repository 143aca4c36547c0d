"""Expert weights that exist in eight bits only while fit runs (`model.moe.fp8.fp8_only`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_moe.nn import routed_experts
from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.optim.sharded import ShardedState
from lightning_moe.parallel.layout import ParamLayout
from lightning_moe.precision import ReleasedParameter, WeightStore, release_, restore_

ADVICE: Final = (
    "or set model.moe.fp8.fp8_only=false (fp8_only=False of MoEPrecision, if that asked)"
)


class ReleasedWeights:
    """Drops weights of which codes and masters stay, and restores them; without `stores` it does nothing.

    Dropped weights still get gradients and updates: the optimizer changes the masters, and these go into the codes.

    Args:
        stores: by name, what computes with the codes of a weight; see `stores_of_released`.
        sharded: the optimizer state with a master of each; None only without `stores`.
    """

    def __init__(self, stores: Mapping[str, WeightStore], sharded: ShardedState | None) -> None:
        self._stores = stores
        self._sharded = sharded

    @torch.no_grad()
    def release(self) -> None:
        """Drop the weights; those that are dropped already stay so."""
        sharded = self._sharded
        for name, store in self._stores.items():
            assert sharded is not None
            spec, weight = sharded.layout.specs[name], sharded.layout.parameters[name]
            if isinstance(weight, ReleasedParameter):
                continue
            store.hold(weight.detach())
            target = sharded.targets[name]
            if spec.split and target.dtype == weight.dtype:
                # It is a view of the weight that is dropped below.
                target.data = target.detach().clone()
            sharded.receivers[name] = store.hold
            release_(weight)

    @torch.no_grad()
    def restore(self, device: torch.device | None = None) -> None:
        """Fill dropped weights from their masters, on another device if one is given; all replicas call it."""
        for name in self._names():
            assert self._sharded is not None
            weight = self._sharded.layout.parameters[name]
            self._stores[name].let_go()
            del self._sharded.receivers[name]
            restore_(weight, self._sharded.gathered(name).to(device or weight.device))

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Restore dropped weights while the context lasts; all replicas enter it."""
        released = bool(self._names())
        self.restore()
        yield
        if released:
            self.release()

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Local weights by name; dropped ones come from their masters, to the CPU, and then all ranks must call it."""
        if not self._names():
            return module.state_dict()
        assert self._sharded is not None
        names = self._sharded.layout.name_of()
        state = module.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, ReleasedParameter):
                state[name] = self._sharded.gathered(names[value]).cpu()
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def can_restore_alone(self) -> bool:
        """Whether `restore` needs no other rank."""
        return self._sharded is None or self._sharded.layout.mesh.ep_dp.size == 1

    def _names(self) -> list[str]:
        return [] if self._sharded is None else list(self._sharded.receivers)


def stores_of_released(
    module: nn.Module, layout: ParamLayout, *, distributed_optimizer: bool
) -> dict[str, WeightStore]:
    """By name, the weights that are to be dropped, and what will compute with their codes.

    Raises:
        ValueError: if there is no master to keep instead.
    """
    names = layout.name_of()
    stores = {
        names[experts.get_parameter(name)]: store
        for experts in routed_experts(module)
        for name, store in experts.backend.only_stores().items()
    }
    if stores and not distributed_optimizer:
        raise ValueError(
            "model.moe.fp8.fp8_only=True keeps masters in the sharded optimizer, which "
            f"strategy.distributed_optimizer=False switches off; leave that at True, {ADVICE}"
        )
    dtypes = [layout.parameters[name].dtype for name in stores]
    narrow = [dtype for dtype in dtypes if dtype != at_least_float32(dtype)]
    if narrow and layout.mesh.shape.world == 1:
        raise ValueError(
            f"model.moe.fp8.fp8_only=True keeps masters, and on one rank a weight in {narrow[0]} "
            f"(trainer.precision) has none beside itself; use bf16-mixed, {ADVICE}"
        )
    return stores


def refuse_released(module: nn.Module) -> None:
    """Check that nothing asks for weights in eight bits only, which needs `ExpertParallelStrategy`.

    Raises:
        ValueError: if something does.
    """
    if any(experts.backend.only_stores() for experts in routed_experts(module)):
        raise ValueError(
            f"model.moe.fp8.fp8_only=True needs strategy=ExpertParallelStrategy, also on one rank; use it, {ADVICE}"
        )
