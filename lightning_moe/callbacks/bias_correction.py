"""Balances experts without a loss: moves the router's expert bias against the load."""

import lightning as L
import torch

from lightning_moe.callbacks.step_reader import StepReader
from lightning_moe.ops.bias import updated_score_bias


class RouterBiasCorrection(L.Callback):
    """Moves `score_bias` of every layer with a `bias_gamma`, once per optimizer step, and centres it where asked to.

    A layer with a `score_bias` and no `bias_gamma` uses its bias as it is.

    The counts are those of all micro-batches and ranks of the step. They are valid also when the optimizer then
    skips the step, so the bias moves all the same. Validation never touches it; the next forward uses it.
    `MoEModule` adds this callback by itself.

    Raises:
        ValueError: at the start of fit, if no layer has a `bias_gamma`.
    """

    _reader: StepReader

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers."""
        self._reader = StepReader(pl_module, "RouterBiasCorrection")
        if all(layer.config.router.bias_gamma is None for layer in self._reader.layers):
            raise ValueError(
                "RouterBiasCorrection: no layer has model.moe.router.bias_gamma; set it, or remove it"
            )

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Move the bias by the counts of the step."""
        statistics = self._reader.new_step(trainer, pl_module)
        if statistics is None:
            return
        for layer, requested_E in zip(self._reader.layers, statistics.requested, strict=True):
            config, bias_E = layer.config.router, layer.router.score_bias
            if config.bias_gamma is not None and bias_E is not None:
                bias_E.copy_(
                    updated_score_bias(
                        bias_E, requested_E, config.bias_gamma, centered=config.bias_centering
                    )
                )
