"""A mean over tokens that is exact over batches of unequal size and over ranks."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """Sum of a quantity over the number of tokens it was summed over; NaN before any token was seen.

    Lightning's own epoch mean weights batches by an integer that it averages over ranks, which is off for unequal
    batches (Lightning issue 21838); sums and counts are not.

    >>> metric = TokenMean()
    >>> metric.update(torch.tensor(6.0), torch.tensor(2))
    >>> metric.update(torch.tensor(4.0), torch.tensor(3))
    >>> metric.compute()
    tensor(2., dtype=torch.float64)
    """

    full_state_update = False
    total: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state(
            "num_tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum"
        )

    def update(self, total: Float[Tensor, ""], num_tokens: Int[Tensor, ""]) -> None:
        """Add a sum over `num_tokens` tokens."""
        self.total += total.detach()
        self.num_tokens += num_tokens

    def compute(self) -> Float[Tensor, ""]:
        """The mean per token."""
        return self.total / self.num_tokens
