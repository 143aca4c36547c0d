"""Statistics of how evenly experts are used. They read integer counts, never losses."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def load_max_over_mean(counts_E: Int[Tensor, " E"]) -> Float[Tensor, ""]:
    """Load of the busiest expert over the mean load: 1 is even, E is everything on one; 1 when nothing was counted.

    Source: Olmo-core 3 report (I_max); MaxVio of arXiv:2408.15664 is this minus 1.
    """
    total = counts_E.sum()
    ratio = counts_E.max() * counts_E.numel() / total.clamp(min=1).to(torch.float64)
    return torch.where(total > 0, ratio, 1.0)
