"""Parameters that are names and shapes until something reads one of them."""

from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

import torch
from torch import nn

Parameters = dict[str, nn.Parameter | None]


class DeferredParameters(Parameters):
    """The parameters of one module, on the meta device until the first one is read; then all get memory and values.

    torch reads a module's own parameters through its mapping `_parameters` and nowhere else: `parameters()`,
    `state_dict()`, attributes, casts, moves and loading all come here, so that none of them meets a parameter without
    memory. A strategy narrows the module before anything has read it, and memory is given to what is left only.
    A copy, also one in another process, is deferred like the original and gets the same values.

    Args:
        parameters: on the meta device.
        device: where memory is given.
        fill: writes the values into the module, once it has memory.
    """

    def __init__(
        self,
        parameters: Parameters,
        device: torch.device,
        fill: Callable[[Any], None],
    ) -> None:
        super().__init__(parameters)
        self.device = device
        self.fill = fill
        self.owner: nn.Module | None = None

    def serve(self, owner: nn.Module) -> None:
        """Become the parameters of `owner`, until the first one is read."""
        self.owner = owner
        owner._parameters = self

    def outline(self) -> Parameters:
        """The parameters on the meta device."""
        return dict(super().items())

    def build(self) -> None:
        """Give memory and values, and leave the module with an ordinary mapping."""
        owner, self.owner = self.owner, None
        if owner is None:  # it has them already
            return
        # Whoever reads first may do so under torch.inference_mode, whose tensors could never be trained.
        with torch.inference_mode(mode=False):
            for name, parameter in self.outline().items():
                if parameter is not None:
                    memory = torch.empty_like(parameter, device=self.device)
                    super().__setitem__(name, nn.Parameter(memory, parameter.requires_grad))
            owner._parameters = self.outline()
            self.fill(owner)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self.build()
        return super().__getitem__(name)

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        owner = self.owner
        self.build()
        super().__setitem__(name, parameter)
        if owner is not None:
            owner._parameters[name] = parameter

    def __iter__(self) -> Iterator[str]:
        # Names need no memory; but without this method `dict(self)` would copy past all the others.
        return super().__iter__()

    def get(self, name: str, default: nn.Parameter | None = None) -> nn.Parameter | None:  # type: ignore[override]  # one signature of three
        """As of any mapping."""
        self.build()
        return super().get(name, default)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # dict's own view isn't public
        """As of any mapping."""
        self.build()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # dict's own view isn't public
        """As of any mapping."""
        self.build()
        return super().values()

    def __reduce__(self) -> tuple[object, ...]:
        return DeferredParameters, (self.outline(), self.device, self.fill)
