"""Finds operations that make the host wait for a device, or copy from one to the other, also on a CPU."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

import torch

from tests.kit.operators import Watch


class HostSyncs(Watch):
    """Notes by name what would sync on a GPU: reading a value, shapes that depend on data, copies from Python.

    Attributes:
        found: names, in order.
    """

    _OPS: ClassVar = {
        torch.ops.aten._local_scalar_dense.default: "item",
        torch.ops.aten.nonzero.default: "nonzero",
        torch.ops.aten.masked_select.default: "masked_select",
        torch.ops.aten.repeat_interleave.Tensor: "repeat_interleave",
        torch.ops.aten.bincount.default: "bincount",
        torch.ops.aten._unique2.default: "unique",
        torch.ops.aten.equal.default: "equal",
        torch.ops.aten.is_nonzero.default: "bool",
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._restore: list[tuple[Any, str, Any]] = []

    def saw(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = self._OPS.get(operator)
        # With the size of its output given, repeat_interleave needs no look at the counts.
        if name is not None and kwargs.get("output_size") is None:
            self.found.append(name)
        elif operator is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.found.append("boolean index")

    def __enter__(self) -> "HostSyncs":
        # These never reach the dispatcher: on a CPU they read or write memory right away.
        self._watch(torch.Tensor, "tolist", "tolist")
        self._watch(torch.Tensor, "numpy", "numpy")
        self._watch(torch.Tensor, "cpu", "cpu")
        self._watch(torch, "tensor", "copy from the host")
        self._watch(torch, "as_tensor", "copy from the host")
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for owner, attribute, original in self._restore:
            setattr(owner, attribute, original)
        self._restore.clear()

    def _watch(self, owner: Any, attribute: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, attribute)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return original(*args, **kwargs)

        self._restore.append((owner, attribute, original))
        setattr(owner, attribute, noted)
