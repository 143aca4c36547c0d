"""Auxiliary losses of all MoE layers of a model, with the weights their configs give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_moe.nn.moe import MoE
from lightning_moe.ops.losses import balance_loss, orthogonality_loss, z_loss
from lightning_moe.ops.records import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLosses:
    """Sums over the valid tokens of one micro-batch.

    Attributes:
        total: every loss times its weight, added up over layers; the only field with gradient.
        balance, z: mean over layers, without weights, also where a weight is off: what to watch.
    """

    total: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]


def router_losses(
    layers: Sequence[MoE],
    records: Sequence[Routing],
    all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> RouterLosses:
    """The losses of `layers`, each from its own record; add `total` to a summed loss that is divided by tokens.

    The orthogonality loss depends on weights only. It enters times this micro-batch's tokens, so that after the
    division by all tokens of an optimizer step it has counted once, whatever the accumulation or number of ranks.

    Args:
        layers: the MoE layers.
        records: one per layer.
        all_reduce_sum: sum of a tensor over all data ranks; called once for all layers, where one has the balance
            scope `global_micro_batch`. None is needed on one rank.

    Raises:
        ValueError: if there isn't exactly one record per layer.
        RuntimeError: if a weighted loss has lost its gradient (see `ops.losses.require_gradient`).
    """
    if len(layers) != len(records) or not layers:
        raise ValueError(
            f"{len(records)} routing records for {len(layers)} MoE layers; pass one record per layer"
        )
    records = _with_global_counts(layers, records, all_reduce_sum)
    total = balance = z = torch.zeros((), device=records[0].num_tokens.device)
    for layer, record in zip(layers, records, strict=True):
        config = layer.config.router
        trainable = torch.is_grad_enabled() and layer.router.weight.requires_grad
        with torch.set_grad_enabled(trainable and bool(config.lb_loss_weight)):
            layer_balance = balance_loss(
                [record], scope=layer.config.router.lb_loss_scope, reduction="sum"
            )
        with torch.set_grad_enabled(trainable and bool(config.z_loss_weight)):
            layer_z = z_loss([record], reduction="sum")
        total = (
            total
            + (config.lb_loss_weight or 0.0) * layer_balance
            + (config.z_loss_weight or 0.0) * layer_z
        )
        if config.orth_loss_weight:
            total = total + config.orth_loss_weight * record.num_tokens * orthogonality_loss(
                layer.router.weight
            )
        balance = balance + layer_balance.detach() / len(layers)
        z = z + layer_z.detach() / len(layers)
    return RouterLosses(total=total, balance=balance, z=z)


def _with_global_counts(
    layers: Sequence[MoE], records: Sequence[Routing], all_reduce_sum: Callable[[Tensor], Tensor]
) -> list[Routing]:
    """Records whose counts are those of all ranks, where the layer's balance scope wants that; one message."""
    wanted = [layer.config.router.lb_loss_scope == "global_micro_batch" for layer in layers]
    if not any(wanted):
        return list(records)
    counts = [record.requested_E for record, want in zip(records, wanted, strict=True) if want]
    sums = all_reduce_sum(torch.cat(counts)).split([count.numel() for count in counts])
    of_layer = iter(sums)
    return [
        replace(record, requested_E=next(of_layer)) if want else record
        for record, want in zip(records, wanted, strict=True)
    ]
