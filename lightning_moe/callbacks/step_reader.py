"""Gives callbacks the MoE layers of a module and its closed optimizer steps, or says what the module lacks."""

import lightning as L

from lightning_moe.nn import MoE, moe_layers
from lightning_moe.step import StepStatistics, closed_step


class StepReader:
    """Gives each closed optimizer step once, however many optimizers and calls of the closure it has.

    Args:
        module: the module that is trained.
        callback: name of the callback that reads, for errors.

    Attributes:
        layers: the MoE layers, in the order of their records.

    Raises:
        ValueError: if there are none.
    """

    def __init__(self, module: L.LightningModule, callback: str) -> None:
        self.layers = required_layers(module, callback)
        self._callback = callback
        self._read: StepStatistics | None = None
        self._read_at = -1

    def new_step(self, trainer: L.Trainer, module: L.LightningModule) -> StepStatistics | None:
        """Statistics of the step in progress, in `on_before_optimizer_step`; None if they were given before.

        Raises:
            RuntimeError: if `training_step` doesn't give one record per layer to a `StepWindow`, or nothing closes it.
        """
        statistics = closed_step(module)
        if statistics is None or len(statistics.requested) != len(self.layers):
            found = 0 if statistics is None else len(statistics.requested)
            raise missing_records(module, len(self.layers), found, self._callback)
        if statistics is self._read or trainer.global_step == self._read_at:
            return None
        self._read, self._read_at = statistics, trainer.global_step
        return statistics


def required_layers(module: L.LightningModule, callback: str) -> list[MoE]:
    """The MoE layers of `module`, in the order of its records.

    Raises:
        ValueError: if there are none, since the callback would do nothing.
    """
    layers = moe_layers(module)
    if not layers:
        raise ValueError(
            f"{callback} found no MoE layer in {type(module).__name__}; remove the callback"
        )
    return layers


def missing_records(
    module: L.LightningModule, num_layers: int, num_records: int, callback: str
) -> RuntimeError:
    """The error for a `training_step` that doesn't give one record per layer to a `StepWindow`."""
    return RuntimeError(
        f"{callback} needs one routing record per MoE layer of {type(module).__name__}: {num_layers} layers, "
        f"{num_records} records; let the module inherit lightning_moe.StepHooks and call "
        "`self.window.record([...])`, or `self.window.add(...)`, in training_step"
    )
