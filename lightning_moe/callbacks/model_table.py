"""Prints a table of the model before training."""

from collections.abc import Sequence

import lightning as L
from rich.console import Console
from rich.table import Table

from lightning_moe.config import MoEConfig, TransformerConfig
from lightning_moe.nn import routed_experts


class ModelTable(L.Callback):
    """Prints sizes, FLOPs per token and the balancing in force at the start of fit, on the first rank.

    Args:
        config: the model.
        sequence_length: for the attention's share of the FLOPs.
    """

    def __init__(self, config: TransformerConfig, sequence_length: int) -> None:
        self.config = config
        self.sequence_length = sequence_length

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        layers = routed_experts(pl_module)
        # The types in which experts compute, and so what can run them, are those of the Trainer's precision.
        with trainer.precision_plugin.forward_context():
            backends = [experts.backend.taken(experts.sizes()) for experts in layers]
        if trainer.is_global_zero:
            on_rank = sum(parameter.numel() for parameter in pl_module.parameters())
            Console().print(
                model_table(self.config, self.sequence_length, backends=backends, on_rank=on_rank)
            )


def model_table(
    config: TransformerConfig, sequence_length: int, *, backends: Sequence[str], on_rank: int
) -> Table:
    """Sizes of the model, and for each kind of MoE layer its experts and its balancing.

    Args:
        config: the model.
        sequence_length: see `ModelTable`.
        backends: what the experts of each MoE layer run on.
        on_rank: parameters that this rank holds.
    """
    layers = [layer.feed_forward for layer in config.layers]
    routed = [layer for layer in layers if isinstance(layer, MoEConfig)]
    table = Table(title="model", show_header=False, title_justify="left")
    table.add_row("layers", f"{len(layers)} ({len(routed)} with experts)")
    table.add_row("parameters, total", f"{config.num_params:,}")
    table.add_row("parameters, active per token", f"{config.num_active_params:,}")
    if on_rank != config.num_params:
        table.add_row("parameters, on each rank", f"{on_rank:,}")
    table.add_row("training FLOPs per token", f"{config.flops_per_token(sequence_length):,}")
    for layer in dict.fromkeys(routed):
        router = layer.router
        own = [backend for kind, backend in zip(routed, backends, strict=True) if kind == layer]
        table.add_row(
            f"experts of {routed.count(layer)} layers",
            f"{layer.num_experts} of width {layer.hidden_size}, top-{router.top_k}, {router.gating_function}, "
            f"backend {', '.join(dict.fromkeys(own))}",
        )
        table.add_row(
            "balancing",
            f"loss weight {router.lb_loss_weight or 0} (scope {router.lb_loss_scope}"
            f"{', mean over layers' if router.lb_loss_over_layers == 'mean' else ''}), "
            f"z-loss {router.z_loss_weight or 0}, orthogonality {router.orth_loss_weight or 0}, "
            f"bias gamma {router.bias_gamma or 0}{' (centred)' if router.bias_centering else ''}",
        )
    return table
