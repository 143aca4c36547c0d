"""From numbers to places on a chart, and to words."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

_THOUSAND: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Maps [low, high] to [start, end], in pixels; `end` may be below `start`, as on a vertical axis."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: np.ndarray, *, start: float, end: float) -> "Scale":
        """A scale that shows all finite values."""
        low, high = _limits(values)
        return cls(low=low, high=high, start=start, end=end)

    def __call__(self, value: float) -> float:
        """The place of `value`."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """Four significant digits at most, with thousands as `12,345`, and words for what is no number."""
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if abs(value) >= _THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """A share as `1.25 %`."""
    return "n/a" if math.isnan(share) else f"{100 * share:.3g} %"


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Lowest and highest finite value; a little room around a constant, and (0, 1) where there is nothing."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        room = abs(low) / 2 or 0.5
        return low - room, high + room
    return low, high
