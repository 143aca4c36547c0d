"""Right numbers in CUDA tensors whose kernels don't run: the CPU's operators on the same memory."""

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from tests.cuda.twins import TWINS
from tests.cuda.waits import leave, listen

# What wraps other tensors shows those to the mode afterwards.
_PLAIN: Final = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Their results have no values, or those of their argument.
_NO_VALUES: Final = {
    "aten::detach",
    "aten::_pin_memory",
    "aten::is_pinned",
    "aten::record_stream",
}
_COMMUNICATION: Final = {"c10d", "c10d_functional", "_c10d_functional"}

# cuDNN's libraries aren't replaced: they would look for a device.
torch.backends.cuda.enable_cudnn_sdp(False)


class Values(_python_dispatch.TorchDispatchMode):
    """Every operator on CUDA tensors runs twice: as it is, without kernels, and on the CPU in the same memory.

    What a CUDA graph captures runs again when the graph is launched, as on a device.

    Attributes:
        seen: number of calls by operator.

    Raises:
        RuntimeError: on exit, if an operator has no CPU twin, since numbers behind it would be wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._captured: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._depth = 0
        self._pools: list[Any] = []

    def __enter__(self) -> "Values":
        # The mode enters itself anew inside of operators.
        if not self._depth:
            listen(self._hear)
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            super().__exit__(kind, error, trace)
            return
        leave(self._hear)
        super().__exit__(kind, error, trace)
        if error is None and self._unknown:
            raise RuntimeError(f"operators without right values: {dict(self._unknown)}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        simpler = self._decomposed(func, args, kwargs)
        if simpler is not NotImplemented:
            return simpler
        # A size that kernels would have written is read from memory: from zeros of a fresh pool, not from garbage.
        with self._fresh_memory() if _sizes_depend(func, args) else nullcontext():
            out = func(*args, **kwargs)
        if not self._has_values(func, args, kwargs, out):
            return out
        self.seen[func.name()] += 1
        return self._computed(func, args, kwargs, out)

    def _fresh_memory(self) -> AbstractContextManager[None]:
        self._pools.append(torch.cuda.MemPool())  # kept: giving memory back waits
        return torch.cuda.use_mem_pool(self._pools[-1])

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator made of others gives, with these shown to the mode."""
        if func.namespace == "aten":
            with self:
                return func.decompose(*args, **kwargs)
        own = OPDEFS.get(func.name().split(".")[0])
        if own is None or func.namespace in _COMMUNICATION:
            return NotImplemented
        with self:
            return own._init_fn(*args, **kwargs)

    def _has_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> bool:
        given, made = _tensors((args, kwargs)), _tensors(out)
        if not any(tensor.is_cuda for tensor in (*given, *made)) or func.namespace != "aten":
            return False
        name = func.name().split(".")[0]
        if func.is_view or "empty" in name or name in _NO_VALUES:
            return False
        # A result that is its argument, as `to` gives where there is nothing to do.
        same = any(m.is_set_to(g) for m in made for g in given if m.is_cuda)
        return func._schema.is_mutable or not same

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        twin = TWINS.get(func.name(), func)
        cpu_args, cpu_kwargs = tree_map(_moved, (args, dict(kwargs)))
        for name in ("generator", "pin_memory"):
            cpu_kwargs.pop(name, None)
        if "non_blocking" in cpu_kwargs:
            cpu_kwargs["non_blocking"] = False

        def compute() -> Any:
            with torch.no_grad(), _python_dispatch._disable_current_modes():
                return twin(*cpu_args, **cpu_kwargs)

        try:
            results = compute()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            self._unknown[f"{func.name()}: {str(error).splitlines()[0][:120]}"] += 1
            return out
        if torch.cuda.is_current_stream_capturing():
            targets = [on_cpu(tensor) for tensor in _tensors(out) if tensor.is_cuda]
            self._captured[_capture()].append(lambda: _fill(targets, compute()))
        return self._with_values(func.name(), out, results)

    def _with_values(self, name: str, out: Any, results: Any) -> Any:
        """`out` filled with `results`; itself made anew where its size depends on values."""
        if not isinstance(out, Tensor) and not isinstance(out, tuple | list):
            return results if isinstance(results, int | float | bool) else out
        with torch.no_grad(), _python_dispatch._disable_current_modes():
            if isinstance(out, Tensor) and isinstance(results, Tensor):
                if out.shape != results.shape:
                    out = torch.empty_like(results, device=out.device)
                _fill([on_cpu(out) if out.is_cuda else out], results)
                return out
            for made, result in zip(_tensors(out), _tensors(results), strict=False):
                if made.shape == result.shape:
                    _fill([on_cpu(made) if made.is_cuda else made], result)
                elif name not in _SHAPES_DIFFER:
                    self._unknown[f"{name}: {tuple(made.shape)} and {tuple(result.shape)}"] += 1
        return out

    def _hear(self, what: str, which: int) -> None:
        if what == "cudaGraphLaunch":
            for compute in self._captured[which]:
                compute()


# Whose further results, for backward, have other sizes on a CPU.
_SHAPES_DIFFER: Final = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"}


def _sizes_depend(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of the result depends on values in CUDA tensors."""
    if torch.Tag.dynamic_output_shape not in func.tags or not args[0].is_cuda:
        return False
    indices = args[1] if func.name() == "aten::index.Tensor" else None
    return indices is None or any(i is not None and i.dtype == torch.bool for i in indices)


def _capture() -> int:
    """Number of the graph that is being captured."""
    return ctypes.c_long.in_dll(ctypes.CDLL(None), "runtime_capture").value


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor in the memory of a CUDA tensor, which lies on the host here."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return on_cpu(value) if isinstance(value, Tensor) and value.is_cuda else value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _fill(targets: list[Tensor], results: Any) -> None:
    for target, result in zip(targets, _tensors(results), strict=False):
        if result.numel() and target.data_ptr() != result.data_ptr():
            target.copy_(result)
