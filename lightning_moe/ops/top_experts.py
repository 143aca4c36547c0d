"""Choice of the k best experts per token, with ties broken the same way everywhere."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.library.custom_op("lightning_moe::top_experts", mutates_args=())
def _top_experts(scores: Tensor, k: int) -> Tensor:
    if scores.is_cuda and scores.dtype == torch.float32:
        return _top_by_unique_keys(scores, k)
    return _top_with_repaired_ties(scores, k)


@_top_experts.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int64)


def top_experts(scores_TE: Float[Tensor, "T E"], k: int) -> Int[Tensor, "T K"]:
    """Indices of the k highest scores of each row, highest first; of equal scores the lowest index wins.

    The ids of a row are always distinct and in range, also where scores are NaN (which sort first) or infinite.
    No gradient flows. This is one custom operator, so that activation checkpointing can save its result and a
    recomputed forward routes exactly as the original did (see `nn.recompute`).

    Raises:
        ValueError: if k is not between 1 and the number of experts.
    """
    num_experts = scores_TE.shape[1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k} must be between 1 and the number of experts, {num_experts}")
    chosen: Tensor = _top_experts(scores_TE.detach(), k)
    return chosen


def _top_with_repaired_ties(scores: Tensor, k: int) -> Tensor:
    """`torch.topk`, whose order among equals is unspecified, with a stable sort of the rows that hold ties."""
    num_experts = scores.shape[1]
    values, ids = scores.topk(min(k + 1, num_experts), dim=-1)
    # "not greater" rather than "equal": it is also true beside a NaN, whose order topk leaves open.
    unordered = (~(values[:, :-1] > values[:, 1:])).any(dim=-1)
    ids = ids[:, :k].contiguous()
    if num_experts > 1 and bool(unordered.any()):
        tied = unordered.nonzero().squeeze(-1)
        ids[tied] = scores[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids


def _top_by_unique_keys(scores: Tensor, k: int) -> Tensor:
    """The same result without a host sync: scores as order-preserving integers, the index in their low bits.

    16 bits hold the index, so it serves up to 65,536 experts.
    """
    num_experts = scores.shape[1]
    # Adding 0.0 turns -0.0 into 0.0, which must tie with it. Negative floats order backwards as integers.
    # One positive NaN for all: its bits are above those of infinity, so it comes first, as in a sort.
    bits = (scores + 0.0).masked_fill(scores.isnan(), torch.nan).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    low_index_first = torch.arange(num_experts - 1, -1, -1, device=scores.device)
    keys = (ordered << 16) + low_index_first
    return num_experts - 1 - (keys.topk(k, dim=-1).values & 0xFFFF)
