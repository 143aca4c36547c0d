"""How evenly experts are used: over everything seen, and batch by batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_moe.metrics.layer_sums import LayerSums
from lightning_moe.ops import load
from lightning_moe.ops.records import Routing

# Statistics of the requested copies.
_OF_REQUESTED: dict[str, Callable[[Tensor], Tensor]] = {
    "max_over_mean": load.load_max_over_mean,
    "max_violation": load.max_violation,
    "entropy": load.load_entropy,
    "entropy_imbalance": load.entropy_imbalance,
    "variation": load.load_variation,
    "dead_share": load.dead_share,
}


class ExpertLoad(LayerSums):
    """Load statistics of the summed counts, as a dictionary with one value per layer (see `ops.load`).

    `max_over_mean max_violation entropy entropy_imbalance variation dead_share` are about requested copies. What drops
    leave of them: `kept_max_over_mean`, `drop_rate` (share of copies), `lost_token_share` (tokens with no copy left).
    What ranks have to do, where expert e of E lives on rank e // (E / num_ranks): `rank_max_over_mean` and
    `kept_rank_max_over_mean`; replicas of the same experts count together. Don't add up or average these over layers
    with unlike experts; the largest is the one to watch.

    >>> from lightning_moe.config import MoEConfig
    >>> from lightning_moe.nn import MoE
    >>> moe, metric = MoE(4, MoEConfig(num_experts=2)), ExpertLoad(2)
    >>> with torch.no_grad():
    ...     _ = moe.router.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    >>> metric(moe(torch.ones(3, 4))[1])["max_over_mean"]
    tensor(2., dtype=torch.float64)
    >>> metric(moe(-torch.ones(1, 4))[1])["max_over_mean"]
    tensor(2., dtype=torch.float64)
    >>> metric.compute()["max_over_mean"]
    tensor(1.5000, dtype=torch.float64)

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        num_ranks: ranks that share out the experts of a layer.
        options: torchmetrics' own, such as `process_group`.
    """

    sums = ("requested", "kept", "num_tokens", "lost_tokens")
    num_tokens: Tensor
    lost_tokens: Tensor

    def __init__(
        self,
        num_experts: int | Sequence[int],
        *,
        num_ranks: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, **options)
        if type(num_ranks) is not int:
            raise ValueError(f"ExpertLoad: num_ranks={num_ranks!r} must be a whole number")
        self.num_ranks = num_ranks
        for size in self.num_experts:
            load.rank_loads(
                torch.zeros(size, dtype=torch.int64), num_ranks
            )  # raises what doesn't fit

    def compute(self) -> dict[str, Float[Tensor, " _"]]:
        """Every statistic, one value per layer."""
        requested, kept = self._by_layer("requested"), self._by_layer("kept")
        values = {
            name: load.of_layers(statistic, requested) for name, statistic in _OF_REQUESTED.items()
        }
        values["kept_max_over_mean"] = load.of_layers(load.load_max_over_mean, kept)
        for name, layers in (("", requested), ("kept_", kept)):
            by_rank = [load.rank_loads(counts, self.num_ranks) for counts in layers]
            values[f"{name}rank_max_over_mean"] = load.of_layers(load.load_max_over_mean, by_rank)
        values["drop_rate"] = torch.stack(
            [load.drop_rate(*pair) for pair in zip(requested, kept, strict=True)]
        )
        values["lost_token_share"] = self.lost_tokens / self.num_tokens.clamp(min=1).double()
        return values


class BatchMaxVio(LayerSums):
    """MaxVio of single batches, each rank's by itself: the `mean` over them and the `max`, one value per layer.

    Batches may be uneven while their sum is even: compare with `max_violation` of `ExpertLoad`. A batch without valid
    tokens counts in neither; before the first other one `mean` is NaN and `max` 0.

    >>> from lightning_moe.ops import Routing
    >>> def record(*counts):
    ...     counts_E = torch.tensor(counts)
    ...     return Routing(requested_E=counts_E, kept_E=counts_E, score_sums_E=counts_E.double(),
    ...                    logz_squared=torch.tensor(0.0), num_tokens=counts_E.sum())
    >>> metric = BatchMaxVio(2)
    >>> metric.update(record(4, 0))
    >>> metric.update(record(1, 3))
    >>> metric.compute()
    {'mean': tensor(0.7500, dtype=torch.float64), 'max': tensor(1., dtype=torch.float64)}

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        options: torchmetrics' own, such as `process_group`.

    Source: MaxVio_batch of arXiv:2408.15664.
    """

    total: Tensor
    num_batches: Tensor
    largest: Tensor

    def __init__(
        self,
        num_experts: int | Sequence[int],
        **options: Any,
    ) -> None:
        super().__init__(num_experts, **options)
        num_layers = len(self.num_experts)
        none = torch.zeros(num_layers, dtype=torch.float64)
        self.add_state("total", default=none.clone(), dist_reduce_fx="sum")
        self.add_state("num_batches", default=none.long(), dist_reduce_fx="sum")
        self.add_state("largest", default=none, dist_reduce_fx="max")

    def update(self, records: Routing | Sequence[Routing]) -> None:
        """Add one batch: the record of the layer, or one record per layer."""
        counts = [record.requested_E for record in self._checked(records)]
        violations = torch.stack([load.max_violation(counts_E) for counts_E in counts])
        self.total += violations
        self.num_batches += torch.stack([counts_E.sum() > 0 for counts_E in counts])
        self.largest = torch.maximum(self.largest, violations)

    def compute(self) -> dict[str, Float[Tensor, " _"]]:
        """Mean and maximum over batches and ranks, one value per layer."""
        return {"mean": self.total / self.num_batches, "max": self.largest}
