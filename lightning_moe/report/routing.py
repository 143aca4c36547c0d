"""Numbers of a routing history that the pages show."""

import numpy as np

from lightning_moe.metrics.routing_history import LayerRouting
from lightning_moe.report.series import EMPTY, Series

MAX_COLUMNS = 200
RECENT = 100
"""Entries of the history that count as the state at the end of a run."""


def recent_load_E(layer: LayerRouting) -> np.ndarray:
    """Load over mean load of each expert, summed over the last `RECENT` entries."""
    return over_mean(layer.requested_SE[-RECENT:].sum(axis=0))


def dead_experts(layer: LayerRouting) -> list[int]:
    """Experts that no token asked for in the last `RECENT` entries."""
    return np.flatnonzero(layer.requested_SE[-RECENT:].sum(axis=0) == 0).tolist()


def dropped_share_S(layer: LayerRouting) -> np.ndarray:
    """Share of the requested token copies that were not computed, by entry."""
    asked_S = layer.requested_SE.sum(axis=1)
    return np.asarray((asked_S - layer.kept_SE.sum(axis=1)) / np.maximum(asked_S, 1))


def known_series(steps_S: np.ndarray, values_S: np.ndarray) -> Series:
    """Values by step, those that are NaN left out."""
    values = values_S.astype(np.float64)
    known = ~np.isnan(values)
    return Series(steps=steps_S[known], values=values[known]) if known.any() else EMPTY


def over_mean(counts: np.ndarray) -> np.ndarray:
    """Counts over their mean along the last axis; NaN where nothing was counted."""
    mean = counts.mean(axis=-1, keepdims=True)
    ratios: np.ndarray = np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=mean > 0)
    return ratios


def load_by_time(layer: LayerRouting) -> np.ndarray:
    """(E, columns): load over mean load, neighbouring entries summed so that there are at most `MAX_COLUMNS`."""
    num_entries = len(layer.requested_SE)
    size = -(-num_entries // MAX_COLUMNS)
    sums = np.add.reduceat(layer.requested_SE, np.arange(0, num_entries, size), axis=0)
    return over_mean(sums).T
