"""What `ExpertLoadMonitor` logs of an entry of the routing history."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_moe.metrics.routing_history import RoutingHistory
from lightning_moe.ops import load

# The worst layer's value; the largest of all others.
WORST: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "balance_inner_product": torch.min,
    "router_margin": torch.min,
}


def layer_values(entry: RoutingHistory, top_k: Sequence[int]) -> dict[str, Tensor]:
    """One value per layer for each name.

    Args:
        entry: a history of one entry.
        top_k: experts per token, of each layer.
    """

    def rows(name: str) -> list[Tensor]:
        return [torch.from_numpy(getattr(layer, name)[0]) for layer in entry.layers]

    def numbers(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(layer, name) for layer in entry.layers]))

    requested, kept = rows("requested_SE"), rows("kept_SE")
    tokens = torch.stack([c.sum() for c in requested]) / torch.tensor(top_k, dtype=torch.float64)
    rates = [load.drop_rate(*pair) for pair in zip(requested, kept, strict=True)]
    return {
        "dead_experts": load.of_layers(load.dead_share, requested),
        "dropped_routes": torch.stack(rates),
        "lost_tokens": numbers("lost_tokens_S") / tokens.clamp(min=1),
        "rank_load_max_over_mean": load.of_layers(load.load_max_over_mean, rows("rank_load_SR")),
        "balance_inner_product": numbers("inner_S"),
        "router_margin": numbers("margin_S"),
    }
