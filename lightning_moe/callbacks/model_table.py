"""What is about to be trained, as a table."""

import lightning as L
from rich.console import Console
from rich.table import Table

from lightning_moe.config import MoEConfig, TransformerConfig


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
        """Print it."""
        if trainer.is_global_zero:
            on_rank = sum(parameter.numel() for parameter in pl_module.parameters())
            Console().print(model_table(self.config, self.sequence_length, on_rank=on_rank))


def model_table(
    config: TransformerConfig, sequence_length: int, *, on_rank: int | None = None
) -> Table:
    """Sizes of the model, and for each kind of MoE layer its experts and its balancing."""
    layers = [layer.feed_forward for layer in config.layers]
    routed = [layer for layer in layers if isinstance(layer, MoEConfig)]
    table = Table(title="model", show_header=False, title_justify="left")
    table.add_row("layers", f"{len(layers)} ({len(routed)} with experts)")
    table.add_row("parameters, total", f"{config.num_params:,}")
    table.add_row("parameters, active per token", f"{config.num_active_params:,}")
    if on_rank is not None and on_rank != config.num_params:
        table.add_row("parameters, on each rank", f"{on_rank:,}")
    table.add_row("training FLOPs per token", f"{config.flops_per_token(sequence_length):,}")
    for layer in dict.fromkeys(routed):
        router = layer.router
        table.add_row(
            f"experts of {routed.count(layer)} layers",
            f"{layer.num_experts} of width {layer.hidden_size}, top-{router.top_k}, {router.gating_function}, "
            f"backend {layer.backend}",
        )
        table.add_row(
            "balancing",
            f"loss weight {router.lb_loss_weight or 0} (scope {router.lb_loss_scope}"
            f"{', mean over layers' if router.lb_loss_over_layers == 'mean' else ''}), "
            f"z-loss {router.z_loss_weight or 0}, orthogonality {router.orth_loss_weight or 0}, "
            f"bias gamma {router.bias_gamma or 0}{' (centred)' if router.bias_centering else ''}",
        )
    return table
