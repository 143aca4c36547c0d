"""Auxiliary losses of all MoE layers of a model, with the weights their configs give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe import ops
from lightning_moe.config import BalanceScope
from lightning_moe.nn.moe import MoE
from lightning_moe.ops.losses import Reduction, orthogonality_loss, z_loss
from lightning_moe.ops.records import Routing

_OWN_COUNTS: Final = ("sequence", "micro_batch")


def balance_loss(
    records: Sequence[Routing],
    *,
    scope: BalanceScope = "micro_batch",
    reduction: Reduction = "mean",
) -> Float[Tensor, ""]:
    """`ops.balance_loss` over the tokens of a balance scope.

    Args:
        records: what the layers' forwards returned, in any order.
        scope: the tokens over which shares of experts are taken. `sequence`: each sequence by itself. `micro_batch`:
            this call's tokens on this rank. The others need records whose `requested_E` are the counts of their
            tokens (`step.step_router_losses` gathers these).
        reduction: `mean` per token; `sum` over tokens, for losses that are divided once per optimizer step.

    Raises:
        RuntimeError: if a gradient is wanted but a record carries none (see `ops.losses.require_gradient`).
        ValueError: if `scope` isn't one of these, or is `sequence` and a record wasn't collected per sequence.
    """
    if scope not in get_args(BalanceScope):
        raise ValueError(f"scope={scope!r} must be one of {', '.join(get_args(BalanceScope))}")
    return ops.balance_loss(records, per_sequence=scope == "sequence", reduction=reduction)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLosses:
    """Sums over the valid tokens of one micro-batch.

    Attributes:
        total: every loss times its weight, added up over layers; the only field with gradient.
        balance, z: mean over layers, without weights, also where a weight is off: for logs.
    """

    total: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]


def router_losses(
    layers: Sequence[MoE],
    records: Sequence[Routing],
    # Not " E": layers may differ in their number of experts.
    counts: Sequence[Int[Tensor, " _"]] | None = None,
) -> RouterLosses:
    """The losses of `layers`, each from its own record; add `total` to a summed loss that is divided by tokens.

    The orthogonality loss depends on weights only. It enters times this micro-batch's tokens, so that after the
    division by all tokens of an optimizer step it has counted once, whatever the accumulation or number of ranks.

    Args:
        layers: the MoE layers.
        records: one per layer.
        counts: one per layer: token copies asked of each expert over the tokens of the layer's balance scope. None
            takes those of `records`; scopes beyond this rank's micro-batch need `step.step_router_losses`, which
            calls this function with them.

    Raises:
        ValueError: if there isn't exactly one record per layer, or `counts` is None and a scope needs them.
        RuntimeError: if a weighted loss has lost its gradient (see `ops.losses.require_gradient`).
    """
    if len(layers) != len(records) or not layers:
        raise ValueError(
            f"{len(records)} routing records for {len(layers)} MoE layers; pass one record per layer"
        )
    counts = _own_counts(layers, records) if counts is None else counts
    total = balance = z = torch.zeros((), device=records[0].num_tokens.device)
    for layer, record, counts_E in zip(layers, records, counts, strict=True):
        config = layer.config.router
        trainable = torch.is_grad_enabled() and layer.router.weight.requires_grad
        with torch.set_grad_enabled(trainable and bool(config.lb_loss_weight)):
            over_scope = replace(record, requested_E=counts_E)
            layer_balance = balance_loss([over_scope], scope=config.lb_loss_scope, reduction="sum")
        with torch.set_grad_enabled(trainable and bool(config.z_loss_weight)):
            layer_z = z_loss([record], reduction="sum")
        parts = len(layers) if config.lb_loss_over_layers == "mean" else 1
        total = (
            total
            + (config.lb_loss_weight or 0.0) / parts * layer_balance
            + (config.z_loss_weight or 0.0) * layer_z
        )
        if config.orth_loss_weight:
            total = total + config.orth_loss_weight * record.num_tokens * orthogonality_loss(
                layer.router.weight
            )
        balance = balance + layer_balance.detach() / len(layers)
        z = z + layer_z.detach() / len(layers)
    return RouterLosses(total=total, balance=balance, z=z)


def _own_counts(layers: Sequence[MoE], records: Sequence[Routing]) -> list[Tensor]:
    for layer in layers:
        scope = layer.config.router.lb_loss_scope
        if scope not in _OWN_COUNTS:
            raise ValueError(
                f"model.moe.router.lb_loss_scope={scope!r} takes counts from more tokens than this call has; call "
                f"step.step_router_losses(module, records) instead, or choose {' or '.join(_OWN_COUNTS)}"
            )
    return [record.requested_E for record in records]
