"""Optimizers that step by gradients which nothing has divided are caught at it."""

import weakref
from collections.abc import Iterator
from typing import Any, Final, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_moe.ops.compiled import outside_of_graphs

UNCLOSED: Final = (
    "an optimizer step went by without its gradients being divided by their tokens: optimizer_step was overridden "
    "without calling super().optimizer_step, or nothing closes the module's StepWindow; call it, or "
    "close_window(self) in on_before_optimizer_step (and window.reset() in on_train_start, where an earlier fit may "
    "have been interrupted)"
)


@runtime_checkable
class Divides(Protocol):
    """A `StepWindow`."""

    @property
    def divides(self) -> bool:
        """Whether it holds a loss whose gradients are still to be divided."""
        ...


@outside_of_graphs
def watch_steps(window: Divides, loss: Tensor) -> None:
    """As long as `window` lives, have no optimizer step parameters behind `loss` before it was closed.

    A window knows neither Trainer nor optimizers, and a module may forget to close it: so all optimizers of the
    process are asked, after each step, whether they hold such a parameter. The step's RuntimeError is `UNCLOSED`.

    Args:
        window: that was given `loss`.
        loss: before its backward.
    """
    open_window = weakref.ref(window)
    parameters = [weakref.ref(leaf) for leaf in _leaves(loss)]

    def refuse(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        watched = open_window()
        if watched is None or not watched.divides:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameter()) in stepped for parameter in parameters):
            raise RuntimeError(UNCLOSED)

    weakref.finalize(window, register_optimizer_step_post_hook(refuse).remove)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that get a gradient from `loss`."""
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
