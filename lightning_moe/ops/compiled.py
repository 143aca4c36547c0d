"""What goes through torch.compile, and what stays outside of its graphs."""

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

# What the optimizers of torch use: the public `torch.compiler.disable` imports the compiler, seconds, at once.
from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


@cache
def compiled(function: Callable[..., T], backend: str) -> Callable[..., T]:
    """`function`, compiled when it is first called.

    Of a method, give the class's function and pass the module as an argument: all modules then share its graphs, and
    no module holds anything that a copy, a pickle or a state dict could lose or show.
    """
    return torch.compile(function, backend=backend)


def compile_refusal(backend: str, device: torch.device) -> str | None:
    """Why `compiled` can't work on this device here, or None if it can."""
    if backend != "inductor" or device.type != "cpu":
        return None
    from torch._inductor import cpp_builder, exc  # noqa: PLC0415 - takes seconds, serves only those who compile

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "on a CPU inductor needs a C++ compiler, and neither $CXX nor g++ or clang++ is one"
    return None


def outside_of_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which compiled code calls as it is: its graph ends before the call, and another goes on after."""
    as_it_is: Callable[P, T] = _disable_dynamo(function)
    return as_it_is
