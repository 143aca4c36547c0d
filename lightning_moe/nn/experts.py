"""The routed experts of one rank: stacked weights, grouped matmuls."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int, Num, UInt8
from torch import Tensor, nn

from lightning_moe.config import FP8Config, MoEConfig
from lightning_moe.nn.deferred import DeferredParameters
from lightning_moe.nn.expert_backends import ExpertBackendChoice
from lightning_moe.ops.activations import activation_function
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.ops.dtypes import matmul_dtype
from lightning_moe.ops.expert_backend import ExpertSizes, ExpertWeights
from lightning_moe.precision import ReleasedParameter, leaves_device

P = ParamSpec("P")
T = TypeVar("T")


def _not_traced_without_weights(
    method: Callable[Concatenate["Experts", P], T],
) -> Callable[Concatenate["Experts", P], T]:
    """`method`, kept out of compiled graphs if weights may be dropped: tracing reads the values of all tensors."""
    around = outside_of_graphs(method)

    @wraps(method)
    def either(self: "Experts", /, *args: P.args, **kwargs: P.kwargs) -> T:
        run = around if self.backend.fp8_only else method
        return run(self, *args, **kwargs)

    return either


class Experts(nn.Module):
    """L feed-forward networks, each applied to its own consecutive rows.

    Attributes:
        w_up_gate: (L, P, W); for swiglu, rows [0, F) make `up` and [F, 2F) `gate`; interleaved for gpt_oss_swiglu.
        w_down: (L, F, W).
        b_up_gate, b_down: (L, P) and (L, W), or None.
        expert_ids: global ids of the experts that live here, in order.
        backend: computes the matmuls; what it derives from the weights is in no state dict.
    """

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        num_experts, hidden = config.num_experts, config.hidden_size
        packed = hidden if config.activation == "relu2" else 2 * hidden
        self.config = config
        self.width = width
        self.expert_ids = range(num_experts)
        self.w_up_gate = nn.Parameter(torch.empty(num_experts, packed, width))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.b_up_gate = (
            nn.Parameter(torch.zeros(num_experts, packed)) if config.expert_bias else None
        )
        self.b_down = nn.Parameter(torch.zeros(num_experts, width)) if config.expert_bias else None
        self.activation = activation_function(
            config.activation, alpha=config.activation_alpha, limit=config.activation_limit
        )
        self.backend = ExpertBackendChoice(config.backend, config.fp8)

    @_not_traced_without_weights
    def encode(self, x_TW: Float[Tensor, "T W"]) -> Num[Tensor, "T _"]:
        """Tokens in the form in which their copies travel to experts: as they are, or as bytes."""
        dtype = matmul_dtype(x_TW)
        return self.backend.settle(self.sizes(dtype)).encode(x_TW, dtype)

    @_not_traced_without_weights
    def forward(
        self,
        rows_RW: Float[Tensor, "R W"],
        counts_L: Int[Tensor, " L"],
        bytes_RZ: UInt8[Tensor, "R Z"] | None = None,
    ) -> Float[Tensor, "R W"]:
        """Rows through their experts: the first counts_L[0] rows through the first expert, and so on.

        With `bytes_RZ`, made by `encode`, values are read from there; `rows_RW` gets the gradient all the same.
        """
        dtype = matmul_dtype(rows_RW)
        weights = ExpertWeights(
            w_up_gate_LPW=self.w_up_gate,
            w_down_LFW=self.w_down,
            b_up_gate_LP=self.b_up_gate,
            b_down_LW=self.b_down,
            activation=self.activation,
            training=self.training,
        )
        backend = self.backend.settle(self.sizes(dtype))
        return backend(rows_RW.to(dtype), weights, counts_L, bytes_RZ)

    def sizes(self, dtype: torch.dtype | None = None) -> ExpertSizes:
        """What decides which backend can run them; `dtype` defaults to that of matmuls with the weights."""
        return ExpertSizes(
            dtype=matmul_dtype(self.w_down) if dtype is None else dtype,
            device=self.w_down.device,
            width=self.w_down.shape[2],
            hidden=self.w_down.shape[1],
            packed=self.w_up_gate.shape[1],
            activation=self.config.activation,
            bias=self.config.expert_bias,
        )

    def use_backend(self, name: str, fp8: FP8Config, *, by_plugin: bool) -> None:
        """Compute with another backend: that of a plugin, or that of the config again."""
        self.backend = ExpertBackendChoice(name, fp8, by_plugin=by_plugin)

    def defer_(self, device: torch.device) -> None:
        """Give memory on `device` to parameters on the meta device, and values, once one of them is read."""
        DeferredParameters(self._parameters, device, _no_values).serve(self)

    def fill_(self, fill: Callable[["Experts"], None]) -> None:
        """Have `fill` write the values of all parameters: now, or as soon as they have memory."""
        if isinstance(self._parameters, DeferredParameters):
            self._parameters.fill = fill
        elif not self.w_down.is_meta:
            fill(self)

    def keep_(self, expert_ids: range) -> None:
        """Keep only these experts (global ids); the others live on other ranks.

        Raises:
            ValueError: if one of them isn't here.
        """
        if expert_ids == self.expert_ids:
            return
        if not set(expert_ids) <= set(self.expert_ids):
            raise ValueError(
                f"experts {expert_ids} are not among {self.expert_ids}, which live on this rank"
            )
        first = expert_ids.start - self.expert_ids.start
        deferred = self._parameters if isinstance(self._parameters, DeferredParameters) else None
        kept = self._parameters if deferred is None else deferred.outline()
        for name, parameter in kept.items():
            if parameter is not None:
                rows = parameter.detach()[first : first + len(expert_ids)].clone()
                kept[name] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        if deferred is not None:
            DeferredParameters(kept, deferred.device, deferred.fill).serve(self)
        self.expert_ids = expert_ids

    def train(self, mode: bool = True) -> "Experts":  # not Self, which beartype can't check
        """As in `nn.Module`; also drops derived weights, since a callback may swap in averaged ones without a trace."""
        self.backend.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        self.backend.forget()
        released = {
            name: parameter
            for name, parameter in self._parameters.items()
            if isinstance(parameter, ReleasedParameter)
        }
        moved = {name for name, parameter in released.items() if leaves_device(parameter, fn)}
        for name, store in self.backend.only_stores().items():
            if name in moved:  # another device can't read its codes
                store.let_go()
        self._parameters.update(dict.fromkeys(released))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(released)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self._parameters, DeferredParameters):
            self._parameters.serve(self)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return (
            f"experts={len(self.expert_ids)}, width={self.width}, hidden={self.config.hidden_size}, "
            f"activation={self.config.activation}"
        )


def _no_values(experts: Experts) -> None:
    """Memory as it is found, like that of `torch.empty`."""


def routed_experts(module: nn.Module) -> list[Experts]:
    """The experts of all MoE layers of any module, in order."""
    return [part for part in module.modules() if isinstance(part, Experts)]
