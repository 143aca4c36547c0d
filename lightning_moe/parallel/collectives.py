"""The only wrapper around collectives: groups along mesh axes, and a ledger of what they sent."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar, Final, Protocol, TypeVar, cast, runtime_checkable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_moe.parallel.mesh import Axis, MeshShape

T = TypeVar("T")


@runtime_checkable
class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result may be read."""
        ...


class Ledger:
    """Calls and payload bytes of this rank's collectives, by (kind, axis)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def enter(self, kind: str, axis: str, payload: Tensor) -> None:
        """Count one call."""
        self.calls[kind, axis] += 1
        self.bytes[kind, axis] += payload.numel() * payload.element_size()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.calls.clear()
        self.bytes.clear()


class AxisGroup:
    """The ranks along one mesh axis that this rank belongs to. A group of one rank communicates nothing.

    Copies of a module share one object, since a process group can't be copied; a pickled one comes back unconnected.

    Attributes:
        axis: its name.
        ranks: global ranks, in the axis' order.
        index: place of this rank among them.
        number: stands for this group in compiled code, which can hold numbers but no connection.
    """

    _numbers: ClassVar = itertools.count()
    _numbered: ClassVar["weakref.WeakValueDictionary[int, AxisGroup]"] = (
        weakref.WeakValueDictionary()
    )

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        index: int,
        group: dist.ProcessGroup | None,
        ledger: Ledger,
    ) -> None:
        self.axis, self.ranks, self.index, self.ledger = axis, ranks, index, ledger
        self._group = group
        self.number = next(self._numbers)
        self._numbered[self.number] = self

    @classmethod
    def numbered(cls, number: int) -> "AxisGroup":
        """The group that has this number in this process."""
        return cls._numbered[number]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Work | None:
        """Reduce in place by `sum` or `max`, with the same bits on every rank."""
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._run(
            "all_reduce", tensor, lambda g: dist.all_reduce(tensor, operation, g, async_op)
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Sum of equal slices of dimension 0: this rank's slice goes to `out`."""
        if self.size == 1:
            out.copy_(tensor)
        return self._run(
            "reduce_scatter",
            tensor,
            lambda g: dist.reduce_scatter_single(out, tensor, group=g, async_op=async_op),
        )

    def all_gather(self, out: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Every rank's tensor, one after the other along dimension 0 of `out`."""
        if self.size == 1:
            out.copy_(tensor)
        return self._run(
            "all_gather",
            tensor,
            lambda g: dist.all_gather_single(out, tensor, group=g, async_op=async_op),
        )

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        *,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Rows of `tensor` to the ranks they are for; equal shares where no splits are given."""
        if self.size == 1:
            out.copy_(tensor)
        return self._run(
            "all_to_all",
            tensor,
            lambda g: dist.all_to_all_single(
                out, tensor, out_splits, in_splits, group=g, async_op=async_op
            ),
        )

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite with the first rank's values."""
        self._run("broadcast", tensor, lambda g: dist.broadcast(tensor, self.ranks[0], group=g))

    def disconnect(self) -> None:
        """Drop the process group."""
        self._group = None

    def _run(self, kind: str, payload: Tensor, call: Callable[[dist.ProcessGroup], T]) -> T | None:
        if self.size == 1:
            return None
        if self._group is None:
            raise RuntimeError(
                f"the connection of mesh axis {self.axis} was closed, or lost when its module was pickled; "
                "set the module up again with its strategy"
            )
        self.ledger.enter(kind, self.axis, payload)
        return call(self._group)

    def __deepcopy__(self, memo: dict[int, object]) -> "AxisGroup":
        return self

    def __reduce__(self) -> tuple[type["AxisGroup"], tuple[object, ...]]:
        return AxisGroup, (self.axis, self.ranks, self.index, None, Ledger())


class ProcessMesh:
    """Process groups for a `MeshShape`; every rank builds it at the same time.

    Attributes:
        shape, rank: the layout and this rank's place in it.
        world: the group of all ranks.
        stage: the group of the ranks that hold the same layers; parameters outside of experts are replicated over it.
        ep, ep_dp: the groups over which tokens travel, and over which an expert is replicated.
        ledger: what all groups sent.
    """

    _AXES: Final[tuple[Axis, ...]] = ("world", "stage", "ep_dp", "ep")

    def __init__(self, shape: MeshShape, timeout: timedelta) -> None:
        self.shape = shape
        self.rank = dist.get_rank()
        self.ledger = Ledger()
        self._world = weakref.ref(_world())
        # Ranks may take longer to start than a collective may last.
        _set_pg_timeout(timeout, _world())
        connected = {axis: self._connect(axis, timeout) for axis in self._AXES}
        self.world, self.stage, self.ep_dp, self.ep = (connected[axis] for axis in self._AXES)

    def _connect(self, axis: Axis, timeout: timedelta) -> AxisGroup:
        own = self.shape.ranks_along(axis, self.rank)
        group: dist.ProcessGroup | None = None
        if len(own) == self.shape.world:
            group = _world()
        elif len(own) > 1:
            # All ranks take part in making each group, also those outside of it.
            for ranks in self.shape.groups(axis):
                made = dist.new_group(
                    list(ranks), timeout=timeout, group_desc=f"lightning_moe.{axis}"
                )
                group = made if ranks == own else group
        return AxisGroup(axis, own, own.index(self.rank), group, self.ledger)

    def serves(self, shape: MeshShape) -> bool:
        """Whether these groups are still alive and have this layout."""
        return self.shape == shape and self._world() is _world()

    def close(self) -> None:
        """Disconnect from all ranks and wait for the threads behind the groups.

        A thread that drops the last tensor of a collective while the interpreter ends aborts the process.
        """
        for axis in (self.world, self.stage, self.ep_dp, self.ep):
            axis.disconnect()
        dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def gather_objects(own: T) -> list[T]:
    """Every rank's object, in rank order; for small ones, outside of steps."""
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return cast("list[T]", everyone)  # all_gather_object has filled every place
