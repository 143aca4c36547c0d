"""How tokens were routed over a run, as `ExpertLoadMonitor` wrote it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_moe.report.series import EMPTY, Series

MAX_COLUMNS = 200
RECENT = 100
"""Records of the history that count as the state at the end of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRouting:
    """One MoE layer over S records of the history, each of one or several optimizer steps.

    A field is None where the run did not record it.

    Attributes:
        steps: (S,) the last step of each record.
        requested_SE, kept_SE: token copies asked of each expert, and computed by it.
        rank_load_SR: token copies that each expert rank computed; NaN where a resumed run didn't have it.
        balance_S: the balance loss without its weight; 1 is even load.
        margin_S, entropy_S: mean lead of the last chosen expert over the next one; mean entropy of the scores (nats).
        lost_tokens_S: tokens that lost all their routes.
    """

    steps: np.ndarray
    requested_SE: np.ndarray
    kept_SE: np.ndarray | None = None
    rank_load_SR: np.ndarray | None = None
    balance_S: np.ndarray | None = None
    margin_S: np.ndarray | None = None
    entropy_S: np.ndarray | None = None
    lost_tokens_S: np.ndarray | None = None

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(self.requested_SE.shape[1])

    def recent_load_E(self, num_records: int) -> np.ndarray:
        """Load over mean load of each expert, summed over the last `num_records` records."""
        return over_mean(self.requested_SE[-num_records:].sum(axis=0))

    def dead_experts(self, num_records: int) -> list[int]:
        """Experts that no token asked for in the last `num_records` records."""
        return np.flatnonzero(self.requested_SE[-num_records:].sum(axis=0) == 0).tolist()

    def dropped_share_S(self) -> np.ndarray:
        """Share of the requested routes that were not computed, by step; empty if not recorded."""
        if self.kept_SE is None:
            return np.zeros(0)
        asked_S = self.requested_SE.sum(axis=1)
        return np.asarray((asked_S - self.kept_SE.sum(axis=1)) / np.maximum(asked_S, 1))

    def series(self, values_S: np.ndarray | None) -> Series:
        """Values of this layer by step, those of steps without any left out; empty if not recorded."""
        if values_S is None or not len(values_S):
            return EMPTY
        values = values_S.astype(np.float64)
        known = ~np.isnan(values)
        return Series(steps=self.steps[known], values=values[known])


def over_mean(counts: np.ndarray) -> np.ndarray:
    """Counts over their mean along the last axis; NaN where nothing was counted."""
    mean = counts.mean(axis=-1, keepdims=True)
    ratios: np.ndarray = np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)
    return ratios


def load_by_time(layer: LayerRouting) -> np.ndarray:
    """(E, columns): load over mean load, neighbouring steps summed so that there are at most `MAX_COLUMNS`."""
    size = -(-len(layer.steps) // MAX_COLUMNS)
    sums = np.add.reduceat(layer.requested_SE, np.arange(0, len(layer.steps), size), axis=0)
    return over_mean(sums).T


def read_layers(history: Mapping[str, np.ndarray]) -> list[LayerRouting]:
    """The layers in the arrays of `callbacks.read_history`, in the order of the model."""
    steps = history.get("steps", np.zeros(0, dtype=np.int64))
    layers: list[LayerRouting] = []
    while (requested := history.get(f"requested_{len(layers)}")) is not None:
        number = len(layers)
        optional = {
            field: history.get(f"{name}_{number}")
            for field, name in (
                ("kept_SE", "kept"),
                ("rank_load_SR", "rank_load"),
                ("balance_S", "balance"),
                ("margin_S", "margin"),
                ("entropy_S", "entropy"),
                ("lost_tokens_S", "lost_tokens"),
            )
        }
        if (loads := optional["rank_load_SR"]) is not None:
            optional["rank_load_SR"] = np.where(loads < 0, np.nan, loads)
        layers.append(LayerRouting(steps=steps, requested_SE=requested, **optional))
    return layers if len(steps) else []
