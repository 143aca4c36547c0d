"""Auxiliary losses of the router. All are sums over tokens, to be divided once by the tokens of a step."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.records import Routing

Reduction = Literal["sum", "mean"]


def balance_loss(
    records: Sequence[Routing],
    *,
    per_sequence: bool = False,
    reduction: Reduction = "mean",
) -> Float[Tensor, ""]:
    """Load-balancing loss E * sum_e f_e * P_e, added up over layers.

    f_e is the share of token copies that expert e was asked for (no gradient), P_e the mean of its scores. It is 1
    per layer at perfect balance, but a value below 1 doesn't prove balance: only the product of both deviations counts.

    Args:
        records: what the layers' forwards returned, in any order.
        per_sequence: take f and P over each sequence by itself, weighted by its tokens, which doesn't depend on how a
            batch is split; else over all tokens of a record, f from its `requested_E`.
        reduction: `mean` per token; `sum` over tokens, for losses that are divided once per optimizer step.

    Raises:
        RuntimeError: if a gradient is wanted but a record carries none (see `require_gradient`).
        ValueError: if `per_sequence` is set and a record wasn't collected per sequence.

    Source: Switch Transformers, arXiv:2101.03961, eq. 4-6, generalised to K choices; scopes: Olmo-core 3 report.
    """
    losses = [_balance_of_layer(record, per_sequence, reduction) for record in records]
    return torch.stack(losses).sum()


def _balance_of_layer(record: Routing, per_sequence: bool, reduction: Reduction) -> Tensor:
    require_gradient(record.score_sums_E, "balance loss")
    num_experts = record.requested_E.shape[-1]
    if per_sequence:
        if record.requested_BE is None or record.score_sums_BE is None:
            raise ValueError(
                "the balance loss per sequence needs records per sequence; build the layer with "
                'router.lb_loss_scope="sequence"'
            )
        requested, score_sums = record.requested_BE, record.score_sums_BE
    else:
        requested, score_sums = record.requested_E, record.score_sums_E
    copies = requested.sum(dim=-1, keepdim=True).clamp(min=1)
    # Integers divided by integers would give float32 even where the scores are float64.
    shares = requested.to(score_sums.dtype) / copies
    total = num_experts * (shares * score_sums).sum()
    return total if reduction == "sum" else total / record.num_tokens.clamp(min=1)


def z_loss(records: Sequence[Routing], *, reduction: Reduction = "mean") -> Float[Tensor, ""]:
    """Router z-loss: squared log-partition of the logits (nats squared), added up over layers.

    Raises:
        RuntimeError: if a gradient is wanted but a record carries none (see `require_gradient`).

    Source: ST-MoE, arXiv:2202.08906, eq. 5.
    """
    totals = []
    for record in records:
        require_gradient(
            record.logz_squared, "z-loss (router.z_loss_weight must be set to train with it)"
        )
        scale = 1 if reduction == "sum" else record.num_tokens.clamp(min=1)
        totals.append(record.logz_squared / scale)
    return torch.stack(totals).sum()


def require_gradient(term: Tensor, name: str) -> None:
    """Refuse to build a loss whose gradient was lost on the way.

    Raises:
        RuntimeError: under enabled gradients, if `term` has none.
    """
    if torch.is_grad_enabled() and not term.requires_grad:
        raise RuntimeError(
            f"the routing record carries no gradient for the {name}: its forward ran without gradients, e.g. inside "
            "a reentrant checkpoint (use torch.utils.checkpoint with use_reentrant=False) or with a frozen router "
            "(then compute this value under torch.no_grad())"
        )


def router_z_loss(
    logits_TE: Float[Tensor, "T E"], valid_T: Bool[Tensor, " T"] | None = None
) -> Float[Tensor, ""]:
    """Sum over (valid) tokens of the squared log-partition (nats squared), at least in float32.

    Keeps logits small, so that their softmax stays accurate in bfloat16.

    Source: ST-MoE, arXiv:2202.08906, eq. 5, summed, not averaged; no coefficient is applied here.
    """
    squares_T = logits_TE.to(at_least_float32(logits_TE.dtype)).logsumexp(dim=-1).square()
    return squares_T.sum() if valid_T is None else torch.where(valid_T, squares_T, 0.0).sum()


def orthogonality_loss(weight_ED: Float[Tensor, "E D"]) -> Float[Tensor, ""]:
    """Mean squared cosine between the router's rows of different experts; 0 for a single expert.

    Depends on weights only: it counts once per optimizer step, whatever the accumulation.
    """
    num_experts = weight_ED.shape[0]
    if num_experts == 1:
        return weight_ED.sum() * 0.0
    unit_ED = torch.nn.functional.normalize(weight_ED.to(at_least_float32(weight_ED.dtype)), dim=-1)
    cosines = unit_ED @ unit_ED.t()
    off_diagonal = cosines - torch.diag_embed(cosines.diagonal())
    return off_diagonal.square().sum() / (num_experts * (num_experts - 1))
