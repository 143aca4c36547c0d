"""An optimizer whose state is spread over the replicas of each parameter."""

import copy
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.ranges import named_range
from lightning_moe.parallel.layout import ParamLayout, ParamSpec


class ShardedState:
    """Makes an elementwise optimizer, in place, update only this rank's part of every large parameter.

    It stays the object that `configure_optimizers` built: its groups now hold flat parts (`targets`), in at least
    float32, so moments and masters exist for them alone. After each step the new weights are gathered. The part of a
    float32 weight is a view of the weight itself and costs nothing.

    Bytes per parameter with AdamW and bfloat16 weights over D replicas: 2 weight + 4 gradient + 12/D.

    Attributes:
        layout: all parameters.
        targets: by name, optimizer parameters that aren't the model's own; gradients go there.
        receivers: by name, what takes a weight's new values in place of the weight, in its type and shape.

    Args:
        optimizers: all optimizers of the module.
        layout: made with `split=True`.
        apart: names of weights that get a target in any case, also where they are whole or frozen: their values may
            be dropped (`optim.released`).

    Raises:
        ValueError: if an optimizer isn't elementwise, or holds a parameter that isn't the module's.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        layout: ParamLayout,
        apart: Collection[str] = (),
    ) -> None:
        self.layout = layout
        self._apart = apart
        self.receivers: dict[str, Callable[[Tensor], None]] = {}
        self.targets: dict[str, nn.Parameter] = {}
        names = layout.name_of()
        refuse_foreign_parameters(optimizers, layout)
        for optimizer in optimizers:
            refuse_unless_elementwise(optimizer, only_masters=bool(apart))
            for group in optimizer.param_groups:
                targets = [self._target(names, parameter) for parameter in group["params"]]
                for parameter, target in zip(group["params"], targets, strict=True):
                    if target is not parameter and parameter in optimizer.state:
                        # A few, like Adagrad, make their state on construction: this rank keeps its part of it.
                        whole = optimizer.state.pop(parameter)
                        spec = layout.specs[names[parameter]]
                        optimizer.state[target] = _part_of_state(whole, parameter, spec)
                group["params"] = targets
            optimizer.register_step_post_hook(lambda *_: self.publish())
        for name in apart:  # frozen weights need a master as well, and no optimizer holds them
            self._target(names, layout.parameters[name])
        self._buckets = self._gather_buckets()

    def _target(self, names: dict[Tensor, str], parameter: nn.Parameter) -> nn.Parameter:
        spec = self.layout.specs[names[parameter]]
        if spec.name in self.targets:  # in several optimizers
            return self.targets[spec.name]
        wide = at_least_float32(parameter.dtype)
        if not spec.split and parameter.dtype == wide and spec.name not in self._apart:
            return parameter  # the optimizer updates all of it, in a type that needs no master
        target = nn.Parameter(
            spec.part_of(parameter.contiguous()).to(wide), requires_grad=parameter.requires_grad
        )
        self.targets[spec.name] = target
        return target

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the weights that the step has changed on all replicas."""
        with named_range("gather"):
            for specs in self._buckets:
                self._publish(specs)
        for name, target in self.targets.items():
            if not self.layout.specs[name].split:
                self._receive(self.layout.specs[name], target)

    def _publish(self, specs: list[ParamSpec]) -> None:
        """One message: the new weights of these parameters, which share a group and a type."""
        group = self.layout.replicas(specs[0])
        weights = [self.layout.parameters[spec.name] for spec in specs]
        parts = [self.targets[spec.name].detach() for spec in specs]
        # Cast before they travel: other ranks need the weights, not the masters.
        own = torch.cat([part.to(w.dtype) for part, w in zip(parts, weights, strict=True)])
        everyone = own.new_empty(group.size * len(own))
        group.all_gather(everyone, own)
        # A row per replica, in which the parts of the bucket's weights follow each other: a column is one weight.
        columns = everyone.view(group.size, -1).split([spec.chunk for spec in specs], dim=1)
        for spec, values in zip(specs, columns, strict=True):
            self._receive(spec, values)

    def _receive(self, spec: ParamSpec, values: Tensor) -> None:
        weight = self.layout.parameters[spec.name]
        if receive := self.receivers.get(spec.name):
            receive(values.to(weight.dtype).reshape(spec.shape))
        elif spec.split:
            weight.view(values.shape).copy_(values)
        else:
            weight.copy_(values.view(spec.shape))

    @torch.no_grad()
    def gathered(self, name: str) -> Tensor:
        """One weight from its masters, in its own type and shape; all replicas call it."""
        spec = self.layout.specs[name]
        part = self.targets[name].detach().to(self.layout.parameters[name].dtype)
        if not spec.split:
            return part.view(spec.shape)
        group = self.layout.replicas(spec)
        whole = part.new_empty(group.size * len(part))
        group.all_gather(whole, part)
        return whole.view(spec.shape)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copy the model's weights into the optimizer's, after weights were loaded."""
        for name, target in self.targets.items():
            weight = self.layout.parameters[name].contiguous()
            target.copy_(self.layout.specs[name].part_of(weight))

    def _gather_buckets(self) -> list[list[ParamSpec]]:
        """Split parameters with one group and type per message, in the module's order."""
        by_kind: dict[tuple[str, torch.dtype], list[ParamSpec]] = {}
        for name in self.layout.parameters:
            spec = self.layout.specs[name]
            if name in self.targets and spec.split:
                by_kind.setdefault((spec.kind, self.layout.parameters[name].dtype), []).append(spec)
        return [part for specs in by_kind.values() for part in _chunks(specs, limit=2**23)]


def _part_of_state(whole: dict[str, Any], parameter: Tensor, spec: ParamSpec) -> dict[str, Any]:
    def part(value: Any) -> Any:  # noqa: ANN401 - states hold numbers as well
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        wide = at_least_float32(value.dtype)
        return spec.part_of(value.contiguous()).to(wide, copy=True)

    return {key: part(value) for key, value in whole.items()}


def _chunks(specs: list[ParamSpec], *, limit: int) -> list[list[ParamSpec]]:
    chunks: list[list[ParamSpec]] = []
    size = limit
    for spec in specs:
        if size + spec.numel > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(spec)
        size += spec.numel
    return chunks


def refuse_foreign_parameters(optimizers: list[Optimizer], layout: ParamLayout) -> None:
    """Check that optimizers hold parameters of the module only: ranks average no other gradients.

    Raises:
        ValueError: if an optimizer holds a parameter that isn't the module's.
    """
    names = layout.name_of()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(parameter not in names for parameter in group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter that isn't one of the module's, so its gradient "
                    "would not be averaged over ranks; register it on the module"
                )


def refuse_unless_elementwise(optimizer: Optimizer, *, only_masters: bool = False) -> None:
    """Check by trial that updating a matrix in parts gives what updating it whole gives.

    Args:
        optimizer: any; it isn't changed.
        only_masters: whether weights are to be dropped for the masters that its parts hold; for the message.

    Raises:
        ValueError: if it doesn't, as with Muon, Adafactor or LBFGS, or if the trial fails.
    """
    name = type(optimizer).__name__
    advice = (
        "use an elementwise optimizer such as AdamW, or set strategy.distributed_optimizer=False"
    )
    if only_masters:
        advice += " and model.moe.fp8.fp8_only=false (fp8_only=False of MoEPrecision, if that asked), which needs it"
    options = [
        {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "name")}
        for group in optimizer.param_groups
    ]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    try:
        whole, parts = (_trial(type(optimizer), options, split, device) for split in (False, True))
    except Exception as error:
        raise ValueError(
            f"strategy.distributed_optimizer=True needs an elementwise optimizer, and {name} could not be tried out "
            f"on a small matrix ({error}); {advice}"
        ) from error
    if not torch.equal(whole, parts):
        raise ValueError(
            f"strategy.distributed_optimizer=True needs an elementwise optimizer, and {name} updates a matrix "
            f"differently in parts; {advice}"
        )


def _trial(
    kind: Callable[..., Optimizer], options: list[dict[str, Any]], split: bool, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(8, 8, generator=generator).to(device) for _ in range(4))
    pieces = [nn.Parameter(p.clone()) for p in (start.view(-1).split(16) if split else [start])]
    required = {
        name: options[0][name]
        for name, argument in inspect.signature(kind).parameters.items()
        if argument.default is argument.empty and name in options[0]
    }
    optimizer = kind([{"params": pieces, **options[0]}], **required)
    for gradient in gradients:
        for piece, g in zip(pieces, gradient.view(-1).split(pieces[0].numel()), strict=True):
            piece.grad = g.view_as(piece).clone()
        optimizer.step()
    return torch.cat([piece.detach().view(-1) for piece in pieces])
