"""Parameters without values: identity, name, shape, hooks and gradient stay; reading values is refused."""

from collections.abc import Callable, Sequence
from types import MethodWrapperType
from typing import Any, Final, Never

import torch
from torch import Tensor, nn

# Attributes of a tensor that show its values.
_VALUES: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA: Final = frozenset(
    {
        Tensor.__len__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.nelement,
        Tensor.numel,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.requires_grad_,
        Tensor.size,
        Tensor.untyped_storage,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    }
)


class ReleasedParameter(nn.Parameter):
    """A parameter that `release_` has emptied: autograd and reducers go on with it, reading or writing it raises.

    As torch's `UninitializedParameter`, which has no shape either. Memory: one element, which is NaN.

    Raises:
        RuntimeError: from every operation that would need the values, with what to do instead.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Allow access to metadata, gradient and hooks."""
        if _needs_values(func):
            refuse_values(_name_of(func))
        return super().__torch_function__(func, types, args, kwargs or {})

    def as_subclass(self, cls: type) -> Never:
        """Refused here: torch asks no `__torch_function__`."""
        refuse_values("as_subclass")

    def __deepcopy__(self, memo: object) -> Never:
        refuse_values("copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> Never:
        refuse_values("pickle")

    def __repr__(self) -> str:  # type: ignore[override]  # torch names a private keyword
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def _needs_values(func: Callable[..., Any]) -> bool:
    if isinstance(func, MethodWrapperType):
        # An attribute comes as the `__get__` or `__set__` of its descriptor.
        return getattr(func.__self__, "__name__", None) in _VALUES
    return func not in _METADATA


def _name_of(func: Callable[..., Any]) -> str:
    """The operation as a user would write it."""
    name: str = getattr(func, "__name__", str(func))
    if isinstance(func, MethodWrapperType):
        verb = "reading" if name == "__get__" else "setting"
        return f"{verb} .{getattr(func.__self__, '__name__', name)}"
    return "detach (which state_dict calls)" if name == "detach" else name


def refuse_values(what: str) -> Never:
    """Say why there are no values and where to find them.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{what} needs the values of an expert weight, and model.moe.fp8.fp8_only=True keeps its codes only while fit "
        "runs. trainer.save_checkpoint and, on all ranks, trainer.strategy.lightning_module_state_dict() take them "
        "from the optimizer's masters; after a fit that broke off, build the module anew and load a checkpoint. "
        "Otherwise set model.moe.fp8.fp8_only=false (fp8_only=False of MoEPrecision, if that asked)"
    )


def release_(parameter: nn.Parameter) -> None:
    """Drop the values and free their memory."""
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    # With a stride of 0, so that C++ code, which skips these checks, reads NaN and can't write.
    parameter.data = nothing.expand(parameter.shape)
    parameter.__class__ = ReleasedParameter


def restore_(parameter: nn.Parameter, values: Tensor) -> None:
    """Make it a parameter again, with these values."""
    parameter.__class__ = nn.Parameter
    parameter.data = values


def leaves_device(parameter: ReleasedParameter, fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether `fn`, which `Module.to` and its like put on every parameter, moves tensors to another device.

    Raises:
        RuntimeError: if it changes their type.
    """
    probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
    if probe.dtype != parameter.dtype:
        refuse_values(f"a cast to {probe.dtype}")
    return probe.device != parameter.device
