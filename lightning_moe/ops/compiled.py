"""What goes through torch.compile, and what stays outside of its graphs."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


@cache
def compiled(function: Callable[..., T], backend: str) -> Callable[..., T]:
    """`function`, compiled when it is first called.

    Of a method, give the class's function and pass the module as an argument: all modules then share its graphs, and
    no module holds anything that a copy, a pickle or a state dict could lose or show.
    """
    return torch.compile(function, backend=backend)


def outside_of_graphs(reason: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A function that compiled code calls as it is: its graph ends before the call, and another one goes on after."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        as_it_is: Callable[..., T] = torch.compiler.disable(function, reason=reason)
        return as_it_is

    return decorate
