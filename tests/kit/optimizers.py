"""Optimizers as users write them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SignDescent(Optimizer):
    """Lion-like: a sign of mixed momentum. Its learning rate has no default."""

    def __init__(self, params: Any, lr: float, *, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        mean.lerp_(gradient, 1 - group["momentum"])
        parameter.sub_(mean.sign(), alpha=group["lr"])


class NormedDescent(SignDescent):
    """Divides by the norm of a tensor: not elementwise."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient / gradient.norm(), alpha=group["lr"])
