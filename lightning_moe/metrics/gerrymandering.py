"""Detects token gerrymandering: a low balance loss although the load is uneven.

A few experts win many tokens by tiny margins while others have score and never win. The loss, which sees only the
product of load and score, falls below its value at perfect balance while experts get no tokens. At a healthy router
the experts with more score also win more tokens: there the loss is above 1 for any uneven load.

Source: Olmo-core 3 report, "token gerrymandering".
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lightning_moe.config import RouterConfig
from lightning_moe.metrics.routing_history import LayerRouting
from lightning_moe.ops import load

# A loss this far below 1, or below its value at the most even load so far, is more than noise of the scores.
_FALL: Final = 0.02
# Busiest expert over the mean from which a load is uneven; also how much worse than at its best it must have become.
_UNEVEN: Final = 1.25
# Further idle experts, as a share, that count as worse.
_MORE_DEAD: Final = 0.05
# Share of the way back, in load or in loss, that ends an episode.
_MARGIN: Final = 0.5
# An episode begins or ends after so many entries in a row.
_PATIENCE: Final = 3
# Layers that a warning describes.
_NAMED: Final = 4
# Standard deviations of an even random load that an uneven one must exceed on top.
_SIGMAS: Final = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHealth:
    """One MoE layer over some optimizer steps and all ranks.

    Attributes:
        balance_loss: per token, of all tokens together.
        max_over_mean: load of the busiest expert over the mean.
        dead_share: share of experts that nothing was asked of.
        num_experts: of the layer.
        num_copies: token copies that were routed.
    """

    balance_loss: float
    max_over_mean: float
    dead_share: float
    num_experts: int
    num_copies: int

    @property
    def noise(self) -> float:
        """Standard deviation of an expert's relative load if copies fell on experts at random."""
        return math.sqrt(self.num_experts / max(self.num_copies, 1))


def layer_health(layer: LayerRouting) -> list[LayerHealth]:
    """What `GerrymanderingAlarm` judges a layer by, one value per entry of its history."""
    requested_SE = torch.from_numpy(layer.requested_SE)
    rows = zip(
        layer.balance_S.tolist(),
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
            num_experts=layer.num_experts,
            num_copies=copies,
        )
        for balance, ratio, dead, copies in rows
    ]


class GerrymanderingAlarm:
    """Reads entries of a routing history and reports once per episode that one has begun.

    A layer is suspicious when in three entries in a row its load is uneven (busiest expert at least 1.25 times the mean
    and four standard deviations of a random load more, or experts idle that chance would have served) and its loss is
    below 0.98, or 0.02 below what it was at the most even load so far, which has got worse by a quarter, or by 5 % more
    idle experts, since. It is so until for three entries half of either has been made good. An episode lasts from the
    first suspicious layer to the last. A layer that only a expert bias balances is not to be judged: its choice is
    meant to depart from the scores, and no loss can be fooled.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers = [_LayerWatch() for _ in range(num_layers)]

    @property
    def suspicious(self) -> list[int]:
        """The layers of the current episode; empty in a healthy run."""
        return [number for number, layer in enumerate(self._layers) if layer.suspicious]

    def begins(self, entry: Sequence[LayerHealth | None]) -> bool:
        """Add the next entry, one value per layer (None: not judged); whether an episode begins with it."""
        before = bool(self.suspicious)
        for layer, health in zip(self._layers, entry, strict=True):
            if health is not None:
                layer.add(health)
        return not before and bool(self.suspicious)


def episodes(layers: Sequence[Sequence[LayerHealth]]) -> list[int]:
    """The entries of a whole history, given layer by layer, at which `GerrymanderingAlarm` finds that one begins."""
    alarm = GerrymanderingAlarm(len(layers))
    return [number for number, entry in enumerate(zip(*layers, strict=True)) if alarm.begins(entry)]


def can_be_fooled(router: RouterConfig) -> bool:
    """Whether a layer with these options is judged: not where its expert bias alone balances it."""
    return router.bias_gamma is None or bool(router.lb_loss_weight)


def warning(step: int, layers: Sequence[int], entry: Sequence[LayerHealth]) -> str:
    """The message for a user when an episode begins at `step` in `layers`."""
    worst = sorted(layers, key=lambda number: -entry[number].max_over_mean)[:_NAMED]
    numbers = "; ".join(
        f"layer {number}: balance loss {entry[number].balance_loss:.3f}, busiest expert "
        f"{entry[number].max_over_mean:.2f} times the mean, "
        f"{round(entry[number].dead_share * entry[number].num_experts)} of {entry[number].num_experts} idle"
        for number in worst
    )
    others = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
    return (
        f"token gerrymandering at step {step}: the balance loss is low although the load is uneven, and the load "
        f"gets no better ({numbers}{others}). A few experts win by tiny margins while others have score and never "
        "win. Lower model.moe.router.lb_loss_weight, or balance by model.moe.router.bias_gamma, which reads "
        "counts only; and watch train/load_max_over_mean, not train/balance_loss"
    )


class _LayerWatch:
    def __init__(self) -> None:
        self.suspicious = False
        self._recent: deque[LayerHealth] = deque(maxlen=_PATIENCE)
        # Most even load so far, and the loss then.
        self._best = (math.inf, math.inf)
        self._fewest_dead = math.inf

    def add(self, health: LayerHealth) -> None:
        if not health.num_copies or math.isnan(health.balance_loss):
            return
        self._recent.append(health)
        if len(self._recent) < _PATIENCE:
            return
        if self.suspicious:
            self.suspicious = not self._is_over()
        else:
            self.suspicious = self._is_uneven() and all(
                entry.balance_loss < self._bound(entry) for entry in self._recent
            )
        self._remember()

    def _is_uneven(self) -> bool:
        return all(_is_uneven(entry, 1.0) for entry in self._recent)

    def _is_over(self) -> bool:
        even = all(not _is_uneven(entry, _MARGIN) for entry in self._recent)
        return even or all(
            entry.balance_loss > self._bound(entry) + _MARGIN * _FALL for entry in self._recent
        )

    def _bound(self, entry: LayerHealth) -> float:
        """The loss below which an entry is suspicious."""
        best_ratio, best_loss = self._best
        worse = (
            entry.max_over_mean > _UNEVEN * best_ratio
            or entry.dead_share >= self._fewest_dead + _MORE_DEAD
        )
        return (max(1.0, best_loss) if worse else 1.0) - _FALL

    def _remember(self) -> None:
        ratio = max(entry.max_over_mean for entry in self._recent)
        if ratio < self._best[0]:
            self._best = ratio, min(entry.balance_loss for entry in self._recent)
        self._fewest_dead = min(self._fewest_dead, max(entry.dead_share for entry in self._recent))


def _is_uneven(entry: LayerHealth, share: float) -> bool:
    """Whether the load is uneven, `share` being how much of the way from even to the bound is enough."""
    excess = entry.max_over_mean - 1
    bound = share * (_UNEVEN - 1) + _SIGMAS * entry.noise
    # With 20 copies per expert chance leaves one in half a billion idle.
    served = entry.num_copies >= 20 * entry.num_experts
    return excess >= bound or (served and entry.dead_share > 0)
