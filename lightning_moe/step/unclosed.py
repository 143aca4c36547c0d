"""Optimizers that step by gradients which nothing has divided are refused."""

import weakref
from collections.abc import Iterator
from typing import Any, Final, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lightning_moe.ops.compiled import outside_of_graphs

UNCLOSED: Final = (
    "nothing has closed the module's StepWindow before its optimizer steps or callbacks read the step, so gradients "
    "are not divided by the tokens of the step: let the module inherit lightning_moe.StepHooks, call "
    "super().on_train_start() where it overrides that, and pass the closure to the optimizer where it overrides "
    "optimizer_step; without StepHooks, call close_window(self) after the last backward of each step"
)


# Hooks whose windows are gone.
_OUTLIVED: Final[list[RemovableHandle]] = []


@runtime_checkable
class Divides(Protocol):
    """A `StepWindow`."""

    @property
    def divides(self) -> bool:
        """Whether it holds a loss whose gradients are still to be divided."""
        ...


@outside_of_graphs
def watch_steps(window: Divides, loss: Tensor) -> None:
    """Make optimizers refuse to step parameters behind `loss` while `window` is to divide their gradients.

    `StepHooks` closes its window. A module without it may forget to, as may one that overrides a hook without
    calling super; the window knows neither Trainer nor optimizers. So all optimizers of the process are asked after
    each step, as long as the window lives, whether they hold such a parameter. Their error is `UNCLOSED`.

    Args:
        window: the window that was given `loss`.
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

    # Not removed as soon as a window is gone: that may be in the middle of a step, while torch goes through the hooks.
    while _OUTLIVED:
        _OUTLIVED.pop().remove()
    weakref.finalize(window, _OUTLIVED.append, register_optimizer_step_post_hook(refuse))


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
