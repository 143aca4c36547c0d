"""What all ranks must agree on before they go on: options, numbers of batches, and the wish to stop."""

import math
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_moe.nn import named_moe_layers
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.strategy.precision import MoEPrecision


def largest_and_smallest(
    value: float, world: AxisGroup, device: torch.device
) -> tuple[float, float]:
    """Maximum and minimum over all ranks."""
    pair = torch.tensor([value, -value], dtype=torch.float64, device=device)
    world.all_reduce(pair, "max")
    largest, negated_smallest = pair.tolist()
    return largest, -negated_smallest


def refuse_uneven(
    num_batches: list[int | float], world: AxisGroup, device: torch.device, what: str
) -> None:
    """Ranks that run out of batches early would leave the others waiting for their tokens.

    Args:
        num_batches: of this rank, per data loader; infinite where unknown.
        world: all ranks.
        device: for the message between them.
        what: stage, for the error.

    Raises:
        RuntimeError: on every rank, if the ranks' numbers differ.
    """
    for i, number in enumerate(num_batches):
        largest, smallest = largest_and_smallest(min(float(number), 1e18), world, device)
        if largest != smallest:
            raise RuntimeError(
                f"{what} data loader {i} has {smallest:.0f} batches on one rank and {largest:.0f} on another; experts "
                "on several ranks need all of them in every step: use a distributed sampler that pads or drops, or "
                f"limit_{what}_batches={smallest:.0f}"
            )


def layer_options(module: nn.Module, plugin: Precision) -> dict[str, object]:
    """What decides how MoE layers compute, and what they send to other ranks; before they are set up."""
    options: dict[str, object] = {
        "trainer.precision": f"{plugin.precision} by {type(plugin).__name__}"
    }
    if isinstance(plugin, MoEPrecision):
        options |= {
            "MoEPrecision experts": plugin.experts,
            "MoEPrecision": plugin.fp8,
            "MoEPrecision linears": plugin.linears and plugin.linears.recipe,
        }
    for name, layer in named_moe_layers(module).items():
        options |= {
            f"width of {name}": layer.router.weight.shape[1],
            f"{name}: model.moe": layer.config,
        }
    return options


def refuse_different(options: Sequence[Mapping[str, object]]) -> None:
    """Ranks that were built with different options would go different ways without a word.

    Args:
        options: of every rank; equal on all. A value may be a config.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    for rank, other in enumerate(options):
        for name in {**options[0], **other}:
            values = options[0].get(name, "missing"), other.get(name, "missing")
            if values[0] != values[1]:
                where, first, second = _first_difference(name, *values)
                raise ValueError(
                    f"{where} is {first} on rank 0 and {second} on rank {rank}; all ranks need the same. If it is "
                    "drawn at random, draw it once and give it to all (in Hydra: a resolver with use_cache=True)"
                )


def _first_difference(name: str, first: object, second: object) -> tuple[str, object, object]:
    """The innermost option in which two values differ."""
    if is_dataclass(first) and type(first) is type(second):
        for field in fields(first):
            own, other = getattr(first, field.name), getattr(second, field.name)
            if own != other:
                return _first_difference(f"{name}.{field.name}", own, other)
    return name, first, second


class EndTogether:
    """An iterable loader of unknown length that ends on all ranks as soon as it ends on one.

    Everything but iteration is the loader's own.
    """

    def __init__(self, loader: Iterable[Any], world: AxisGroup, device: torch.device) -> None:
        self._loader = loader
        self._world = world
        self._device = device

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        own = iter(self._loader)
        missing = object()
        while True:
            batch = next(own, missing)
            largest, smallest = largest_and_smallest(
                float(batch is not missing), self._world, self._device
            )
            if smallest == 0:
                if largest == 1:
                    rank_zero_warn(
                        "a data loader ended on one rank before the others: all ranks end it here"
                    )
                return
            yield batch


class StopRequest:
    """Remembers a signal until all ranks can stop together.

    Lightning's own handlers run collectives inside of the signal, wherever that hits; these set a flag.
    """

    def __init__(self) -> None:
        self.received = 0

    def install(self, signals: Iterable[int]) -> None:
        """Take over these signals until Lightning's teardown restores the handlers of before."""
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: object) -> None:
        self.received = number

    def agreed(self, world: AxisGroup, device: torch.device) -> int:
        """The signal that any rank has received; 0 for none."""
        return int(largest_and_smallest(float(self.received), world, device)[0])


def is_sized(loader: object) -> bool:
    """Whether the number of batches is known before iteration."""
    try:
        return isinstance(loader, Sized) and math.isfinite(len(loader))
    except (TypeError, NotImplementedError):  # how loaders of iterable data say that it isn't known
        return False
