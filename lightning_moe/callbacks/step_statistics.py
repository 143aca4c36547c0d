"""Shared by callbacks that read routing: layers, counts of the closed step, tracing, errors that end no training."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning as L

from lightning_moe import nn
from lightning_moe.nn import MoE
from lightning_moe.step import StepStatistics, closed_step


def moe_layers(module: L.LightningModule, asked_by: str) -> list[MoE]:
    """The MoE layers of `module`, in the order of its records.

    Raises:
        ValueError: if there are none, since the callback would do nothing.
    """
    layers = nn.moe_layers(module)
    if not layers:
        raise ValueError(
            f"{asked_by} found no MoE layer in {type(module).__name__}; remove the callback"
        )
    return layers


def step_statistics(module: L.LightningModule, layers: list[MoE], asked_by: str) -> StepStatistics:
    """Statistics of the optimizer step in progress, in `on_before_optimizer_step`.

    Raises:
        RuntimeError: if the module's `training_step` hands no records, or not one per layer, to a `StepWindow`, or
            nothing closes that.
    """
    statistics = closed_step(module)
    if statistics is None or len(statistics.requested) != len(layers):
        found = 0 if statistics is None else len(statistics.requested)
        raise missing_records(module, len(layers), found, asked_by)
    return statistics


class TraceSwitch:
    """Switches tracing of routers on and off; routers whose tracing was on before stay on."""

    def __init__(self, layers: Sequence[MoE] = ()) -> None:
        self._routers = [layer.router for layer in layers]
        self._switched = self._routers[:0]

    def on(self) -> None:
        """Trace from the next forward on."""
        for router in self._routers:
            if not router.trace:
                router.trace = True
                self._switched.append(router)

    def off(self) -> None:
        """Turn off what `on` turned on."""
        for router in self._switched:
            router.trace = False
        self._switched = []


@contextmanager
def not_fatal(what: str) -> Iterator[None]:
    """Turns an error into a warning: a diagnosis that fails must neither end training nor hide why it ended."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what} failed, training isn't affected: {error!r}", stacklevel=3)


def missing_records(
    module: L.LightningModule, num_layers: int, num_records: int, asked_by: str
) -> RuntimeError:
    """The error for a `training_step` that hands no records, or not one per layer, to a `StepWindow`."""
    return RuntimeError(
        f"{asked_by} needs one routing record per MoE layer of {type(module).__name__}: {num_layers} layers, "
        f"{num_records} records; let the module inherit lightning_moe.StepHooks and call "
        "`self.window.record([...])`, or `self.window.add(...)`, in training_step"
    )
