"""Statistics of how evenly experts are used. They read integer counts, never losses.

Every function takes counts of one layer, or of several that have equally many experts, experts last. A layer that
counted nothing is even. Ratios don't add up: sum counts over batches and ranks first.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def load_max_over_mean(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """Load of the busiest expert over the mean load: 1 is even, E is everything on one.

    Source: Olmo-core 3 report (I_max); MaxVio of arXiv:2408.15664 is this minus 1.
    """
    return relative_load(counts).amax(dim=-1)


def max_violation(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """MaxVio: (busiest load - mean load) / mean load; 0 is even.

    Source: Auxiliary-loss-free load balancing, arXiv:2408.15664, section 2.
    """
    return load_max_over_mean(counts) - 1


def relative_load(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers E"]:
    """Load of every expert over the mean load (float64)."""
    total = counts.sum(dim=-1, keepdim=True)
    relative = counts * counts.shape[-1] / total.clamp(min=1).to(torch.float64)
    return torch.where(total > 0, relative, 1.0)


def load_entropy(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """Entropy of the experts' shares (nats): log(E) is even, 0 is everything on one."""
    terms: Tensor = torch.special.entr(relative_load(counts) / counts.shape[-1])
    return terms.sum(dim=-1)


def entropy_imbalance(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """1 - entropy / log(E): 0 is even, 1 is everything on one; 0 for a single expert.

    Source: Olmo-core 3 report (I_H); over the experts of one rank it goes along with the speed of a grouped matmul.
    """
    num_experts = counts.shape[-1]
    if num_experts == 1:
        return load_entropy(counts)
    return 1 - load_entropy(counts) / math.log(num_experts)


def load_variation(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """Coefficient of variation: standard deviation of the loads, over all E of them, divided by their mean."""
    return relative_load(counts).std(dim=-1, correction=0)


def dead_share(counts: Int[Tensor, "*layers E"]) -> Float[Tensor, "*layers"]:
    """Share of experts without a token copy; 0 where no expert has one."""
    return (relative_load(counts) == 0).double().mean(dim=-1)


def drop_rate(
    requested: Int[Tensor, "*layers E"], kept: Int[Tensor, "*layers E"]
) -> Float[Tensor, "*layers"]:
    """Share of the requested token copies that were not computed."""
    wanted = requested.sum(dim=-1)
    return (wanted - kept.sum(dim=-1)) / wanted.clamp(min=1).to(torch.float64)


def rank_loads(counts: Int[Tensor, "*layers E"], num_ranks: int) -> Int[Tensor, "*layers _"]:
    """Copies that each rank computes, where expert e of E lives on rank e // (E / num_ranks).

    Raises:
        ValueError: if the experts don't divide evenly.
    """
    if num_ranks < 1 or counts.shape[-1] % num_ranks:
        raise ValueError(
            f"{counts.shape[-1]} experts don't spread evenly over {num_ranks} ranks; choose a divisor"
        )
    by_rank: Tensor = counts.unflatten(-1, (num_ranks, -1))
    return by_rank.sum(dim=-1)


def balance_inner_product(
    requested: Int[Tensor, "*layers E"], score_sums: Float[Tensor, "*layers E"]
) -> Float[Tensor, "*layers"]:
    """E * (f - 1/E) . (P - 1/E), f the shares of requested copies and P those of the scores; 0 if there are none.

    The balance loss over the same tokens is 1 plus this; NaN if a score is. It sees nothing of the load f but its
    product with P: the loss is 1 for any load where P is even, and below 1 where the experts that win are not those
    with the most score.

    Source: Olmo-core 3 report, "token gerrymandering".
    """
    num_experts = requested.shape[-1]
    scores = score_sums.to(torch.float64)
    total = scores.sum(dim=-1, keepdim=True)
    # Not `total > 0`: scores that are NaN must not pass for even ones.
    shares = torch.where(
        total == 0, 1 / num_experts, scores / total.clamp(min=torch.finfo(torch.float64).tiny)
    )
    return ((relative_load(requested) - 1) * (shares - 1 / num_experts)).sum(dim=-1)


def of_layers(
    statistic: Callable[[Tensor], Tensor], counts: Sequence[Int[Tensor, " _"]]
) -> Float[Tensor, " _"]:
    """One value of `statistic` per layer; all at once where the layers have equally many experts."""
    if len({counts_E.numel() for counts_E in counts}) == 1:
        return statistic(torch.stack(list(counts)))
    return torch.stack([statistic(counts_E) for counts_E in counts])
