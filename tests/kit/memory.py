"""Bytes of tensors: alive at once, and kept for the backward pass. Counted, not read from the process."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.kit.operators import Watch


class LiveBytes(Watch):
    """Follows every memory block that an operator makes meanwhile, until its last tensor is gone.

    What a kernel takes and gives back inside one operator isn't seen.

    Attributes:
        live: bytes now.
        peak: most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def saw(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = {block._cdata for block in _blocks(pytree.tree_leaves((args, kwargs)))}
        for block in _blocks(pytree.tree_leaves(result)):
            is_new = block._cdata not in given and block._cdata not in self._known
            if is_new and block.device.type != "meta":
                self._follow(block)

    def _follow(self, block: torch.UntypedStorage) -> None:
        key, size = block._cdata, block.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(block, gone)


class TouchedBytes(Watch):
    """Follows the blocks of `tensors` and all that an operator touches meanwhile, also those whose size changes.

    Attributes:
        peak: most bytes at once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weigh(tensors)

    def saw(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self._weigh(pytree.tree_leaves((args, kwargs, result)))

    def _weigh(self, values: Iterable[Any]) -> None:
        # A DTensor has no memory of its own; operators on its local tensor aren't seen.
        for block in _blocks(v for v in values if type(v) in (Tensor, torch.nn.Parameter)):
            if block._cdata not in self._known:
                self._known[block._cdata] = weakref.ref(
                    block, lambda _, key=block._cdata: self._known.pop(key)
                )
        blocks = [known() for known in self._known.values()]
        # FSDP2 frees gathered weights by shrinking their block.
        self.peak = max(self.peak, sum(block.nbytes() for block in blocks if block is not None))


def _blocks(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in values if isinstance(value, Tensor)]


def kept_bytes(forward: Callable[[], Any], *, without: Iterable[Tensor] = ()) -> int:
    """Bytes that `forward()` keeps for backward, each memory block once; those of `without` not."""
    ignored = {block._cdata for block in _blocks(without)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        block = tensor.untyped_storage()
        if block._cdata not in ignored:
            kept[block._cdata] = block
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(block.nbytes() for block in kept.values())
