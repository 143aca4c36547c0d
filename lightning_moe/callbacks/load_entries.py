"""From counts to an entry of the routing history, and from an entry to what is logged and watched."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from lightning_moe.callbacks.gerrymandering import LayerHealth
from lightning_moe.callbacks.routing_history import Entry
from lightning_moe.callbacks.routing_sums import LayerTotals
from lightning_moe.ops import load


def make_entry(
    step: int, num_steps: int, requested: Sequence[Tensor], totals: Sequence[LayerTotals]
) -> Entry:
    """One row of a routing history; see `read_history`."""
    entry: dict[str, np.ndarray] = {"steps": np.array(step), "num_steps": np.array(num_steps)}
    for number, (counts_E, sums) in enumerate(zip(requested, totals, strict=True)):
        inner = load.balance_inner_product(counts_E, sums.score_sums_E)
        # Nothing was routed: there is no loss.
        inner = torch.where(counts_E.sum() > 0, inner, torch.nan)
        values = {
            "requested": counts_E,
            "kept": sums.kept_E,
            "rank_load": sums.rank_load,
            "lost_tokens": sums.lost_tokens,
            "balance": 1 + inner,
            "inner": inner,
            "margin": sums.margin,
            "entropy": sums.entropy,
        }
        entry |= {f"{name}_{number}": value.numpy() for name, value in values.items()}
    return entry


def describes(entry: Entry, num_experts: Sequence[int]) -> bool:
    """Whether an entry is of a model with these numbers of experts in its MoE layers."""
    layers = range(len(num_experts))
    names = {f"{name}_{layer}" for name in _OF_LAYER for layer in layers} | {"steps", "num_steps"}
    return entry.keys() == names and all(
        entry[f"requested_{layer}"].shape == (num_experts[layer],) for layer in layers
    )


_OF_LAYER: Final = (
    "requested",
    "kept",
    "rank_load",
    "lost_tokens",
    "balance",
    "inner",
    "margin",
    "entropy",
)


def columns(entry: Entry, name: str) -> list[Tensor]:
    """The arrays of one name, one per layer."""
    values: list[Tensor] = []
    while (value := entry.get(f"{name}_{len(values)}")) is not None:
        values.append(torch.from_numpy(np.asarray(value)))
    return values


def layer_values(entry: Entry, top_k: Sequence[int]) -> dict[str, Tensor]:
    """What `ExpertLoadMonitor` logs of an entry, one value per layer."""
    requested, kept = columns(entry, "requested"), columns(entry, "kept")
    tokens = torch.stack([c.sum() for c in requested]) / torch.tensor(top_k, dtype=torch.float64)
    rates = [load.drop_rate(*pair) for pair in zip(requested, kept, strict=True)]
    return {
        "dead_experts": load.of_layers(load.dead_share, requested),
        "dropped_routes": torch.stack(rates),
        "lost_tokens": torch.stack(columns(entry, "lost_tokens")) / tokens.clamp(min=1),
        "rank_load_max_over_mean": load.of_layers(
            load.load_max_over_mean, columns(entry, "rank_load")
        ),
        "balance_inner_product": torch.stack(columns(entry, "inner")),
        "router_margin": torch.stack(columns(entry, "margin")),
    }


# The value that deserves a look; the largest of all others.
WORST: dict[str, Callable[[Tensor], Tensor]] = {
    "balance_inner_product": torch.min,
    "router_margin": torch.min,
}


def layer_health(entry: Entry) -> list[LayerHealth]:
    """What `GerrymanderingAlarm` judges by, one per layer."""
    both = zip(columns(entry, "requested"), columns(entry, "balance"), strict=True)
    return [health_by_entry(counts_E[None], balance[None])[0] for counts_E, balance in both]


def health_by_entry(requested_SE: Tensor, balance_S: Tensor) -> list[LayerHealth]:
    """What `GerrymanderingAlarm` judges one layer by, over S entries of a history."""
    rows = zip(
        balance_S.tolist(),
        load.load_max_over_mean(requested_SE).tolist(),
        load.dead_share(requested_SE).tolist(),
        requested_SE.sum(dim=-1).tolist(),
        strict=True,
    )
    return [
        LayerHealth(
            balance_loss=balance,
            max_over_mean=ratio,
            dead_share=dead,
            num_experts=requested_SE.shape[-1],
            num_copies=copies,
        )
        for balance, ratio, dead, copies in rows
    ]
