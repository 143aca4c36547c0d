"""Finds operations that make the host wait for a device, or copy from one to the other, also on a CPU."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostSyncs(TorchDispatchMode):
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

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = self._OPS.get(func)
        # With the size of its output given, repeat_interleave needs no look at the counts.
        if name is not None and kwargs.get("output_size") is None:
            self.found.append(name)
        elif func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.found.append("boolean index")
        return func(*args, **kwargs)

    def __enter__(self) -> "HostSyncs":
        # These never reach the dispatcher: on a CPU they read or write memory right away.
        self._watch(torch.Tensor, "tolist", "tolist")
        self._watch(torch.Tensor, "numpy", "numpy")
        self._watch(torch.Tensor, "cpu", "cpu")
        self._watch(torch, "tensor", "copy from the host")
        self._watch(torch, "as_tensor", "copy from the host")
        return super().__enter__()  # type: ignore[no-any-return]

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

    def _watch(self, owner: Any, attribute: str, name: str) -> None:  # noqa: ANN401
        original: Callable[..., Any] = getattr(owner, attribute)

        def noted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.found.append(name)
            return original(*args, **kwargs)

        self._restore.append((owner, attribute, original))
        setattr(owner, attribute, noted)
