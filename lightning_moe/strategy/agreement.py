"""The options that all ranks must agree on before they go on."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_moe.nn import named_moe_layers
from lightning_moe.strategy.precision import MoEPrecision


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


def step_options(trainer: Any) -> dict[str, object]:  # noqa: ANN401 - the Trainer sets many attributes dynamically
    """What decides how often ranks step, and how far."""
    names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
    options: dict[str, object] = {f"trainer.{name}": getattr(trainer, name) for name in names}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            options |= {
                f"{key} of optimizer {i}, group {j},": value
                for key, value in group.items()
                if isinstance(value, int | float)
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
