"""One logged number over a run."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One logged number by optimizer step.

    Attributes:
        steps: (P,) ascending, counted from 0.
        values: (P,) float64; NaN and infinity are what the run logged.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The newest value; NaN if there is none."""
        return float(self.values[-1]) if len(self) else math.nan

    @property
    def lowest(self) -> float:
        """The smallest finite value; NaN if there is none."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite.min()) if len(finite) else math.nan

    def recent_median(self) -> float:
        """Median of the second half, finite values only: what a run settled at, whatever its first steps took."""
        half = self.values[len(self) // 2 :]
        finite = half[np.isfinite(half)]
        return float(np.median(finite)) if len(finite) else math.nan


EMPTY: Final = Series(steps=np.zeros(0, dtype=np.int64), values=np.zeros(0))
