"""Balances experts without a loss: moves the router's expert bias against the load."""

import lightning as L
import torch

from lightning_moe.callbacks.step_statistics import moe_layers, step_statistics
from lightning_moe.nn import MoE
from lightning_moe.ops.bias import updated_score_bias
from lightning_moe.step import StepStatistics


class RouterBiasCorrection(L.Callback):
    """Moves `score_bias` of every layer with a `bias_gamma`, once per optimizer step, and centres it where asked to.

    A layer with a `score_bias` and no `bias_gamma` uses its bias as it is.

    The counts are those of all micro-batches and ranks of the step. They are valid also when the optimizer then
    skips the step, so the bias moves all the same. Validation never touches it; the next forward uses it.
    `MoEModule` adds this callback by itself.

    Raises:
        ValueError: at the start of fit, if no layer has a `bias_gamma`.
    """

    def __init__(self) -> None:
        self._layers: list[MoE] = []
        self._applied: StepStatistics | None = None
        self._applied_at = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers."""
        self._layers = moe_layers(pl_module, "RouterBiasCorrection")
        self._applied, self._applied_at = None, -1
        if all(layer.config.router.bias_gamma is None for layer in self._layers):
            raise ValueError(
                "RouterBiasCorrection: no layer has model.moe.router.bias_gamma; set it, or remove it"
            )

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Move the bias, unless these counts were used already, by a second optimizer or an earlier closure call."""
        statistics = step_statistics(pl_module, self._layers, "RouterBiasCorrection")
        if statistics is self._applied or trainer.global_step == self._applied_at:
            return
        self._applied, self._applied_at = statistics, trainer.global_step
        for layer, requested_E in zip(self._layers, statistics.requested, strict=True):
            config, bias_E = layer.config.router, layer.router.score_bias
            if config.bias_gamma is not None and bias_E is not None:
                bias_E.copy_(
                    updated_score_bias(
                        bias_E, requested_E, config.bias_gamma, centered=config.bias_centering
                    )
                )
