"""The rule that moves the router's expert bias."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def updated_score_bias(
    score_bias_E: Float[Tensor, " E"],
    requested_E: Int[Tensor, " E"],
    gamma: float,
    *,
    centered: bool = False,
) -> Float[Tensor, " E"]:
    """Bias after one step of size `gamma` (score units): up for experts below the mean load, down above it.

    `requested_E` are exact counts (copies asked for) of one whole optimizer step, summed over every rank that
    holds tokens of this layer. The bias of an expert at the mean, and of every expert in an empty step, stays as it
    is. The mean of the bias drifts unless it is `centered` afterwards: a common shift changes
    no choice, but a large one rounds away the small differences that decide.

    Source: Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664, algorithm 1.
    """
    # mean - count has the sign of sum - E * count, which integers hold exactly.
    missing_E = requested_E.sum() - requested_E.numel() * requested_E
    moved_E = score_bias_E + gamma * torch.sign(missing_E).to(score_bias_E.dtype)
    if not centered:
        return moved_E
    # In float64: rounding the mean would shift it anew in every step.
    return (moved_E.double() - moved_E.double().mean()).to(score_bias_E.dtype)
