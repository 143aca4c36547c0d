"""Finds where the routes of two runs first differ, and whether near-ties explain it."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_moe.metrics.token_routes import RouteKey, Routes, read_routes

Trace = dict[RouteKey, list[Routes]]
"""Per place, the routes of every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first token, by step, micro-batch, layer and rank, that went to other experts.

    Attributes:
        key, rank, token: where.
        num_tokens, num_near_ties: tokens that differ at that step, micro-batch and layer, and near-ties among them.
        ids, weights, margins: of that token, in the first and in the second trace.
        equal_before: places before it where all tokens went the same way.
    """

    key: RouteKey
    rank: int
    token: int
    num_tokens: int
    num_near_ties: int
    ids: tuple[list[int], list[int]]
    weights: tuple[list[float], list[float]]
    margins: tuple[float, float]
    equal_before: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDifference:
    """All compared places of one layer.

    Attributes:
        layer: counted from 0.
        num_tokens: valid tokens that were compared.
        num_other: that went to other experts.
        num_near_ties: of those, how many had a margin of at most the tie in both traces.
        num_reordered: that went to the same experts in another order.
        largest_margin: over those that went to other experts, the larger one of both traces; NaN if there are none.
        weight_change: largest difference of a weight where the route is the same.
    """

    layer: int
    num_tokens: int
    num_other: int
    num_near_ties: int
    num_reordered: int
    largest_margin: float
    weight_change: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesDiff:
    """Two traces compared.

    Attributes:
        layers: by layer, over all places that both traces have.
        first: None if all tokens went to the same experts.
        tie: margins up to this count as near-ties.
        only_first, only_second: places that one of the traces lacks.
    """

    layers: list[LayerDifference]
    first: FirstDifference | None
    tie: float
    only_first: list[RouteKey]
    only_second: list[RouteKey]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same places, and all tokens went to the same experts there, in the same order."""
        reordered = any(layer.num_reordered for layer in self.layers)
        return not (self.first or reordered or self.only_first or self.only_second)

    def conclusion(self) -> str:
        """A sentence on the cause of the differences."""
        if self.first is not None:
            return _why(self.first, self.tie)
        change = max(layer.weight_change for layer in self.layers)
        if any(layer.num_reordered for layer in self.layers):
            return "Every token went to the same experts, some in another order: the choice is the same."
        if change:
            return f"Every token took the same route; weights differ by up to {change:.3g}, which changed no choice."
        return "Every token took the same route with the same weights."


def read_trace(path: Path) -> Trace:
    """One file, or all `routes-rank*.npz` of a run folder.

    Raises:
        FileNotFoundError: if there is nothing to read.
        ValueError: if a file is damaged, or ranks have traced different places.
    """
    if not path.is_dir():
        return {key: [routes] for key, routes in read_routes(path).items()}
    numbered = {
        int(match.group(1)): file
        for file in path.glob("routes-rank*.npz")
        if (match := re.fullmatch(r"routes-rank(\d+)\.npz", file.name))
    }
    if sorted(numbered) != list(range(len(numbered))) or not numbered:
        raise FileNotFoundError(
            f"{path} has no routes-rank0.npz, or lacks the file of a rank; trace a run with the callback RoutingTrace"
        )
    ranks = [read_routes(numbered[rank]) for rank in sorted(numbered)]
    if any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise ValueError(f"{path}: its ranks have traced different steps; were all files written?")
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def compare(first: Trace, second: Trace, *, tie: float) -> RoutesDiff:
    """Compare all places that both traces have.

    Args:
        first: one trace.
        second: the other one.
        tie: margins up to this, in units of the selection score, count as near-ties.

    Raises:
        ValueError: if there are none, or tokens of one place can't be the same tokens.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError(
            f"the traces have no step, micro-batch and layer in common: {_span(first)} and {_span(second)}"
        )
    places = {key: _compare_place(key, first[key], second[key], tie) for key in common}
    by_layer: dict[int, list[_Tokens]] = {}
    for key, ranks in places.items():
        by_layer.setdefault(key.layer, []).extend(ranks)
    return RoutesDiff(
        layers=[_layer(layer, by_layer[layer]) for layer in sorted(by_layer)],
        first=_first_difference(first, second, places),
        tie=tie,
        only_first=sorted(first.keys() - second.keys()),
        only_second=sorted(second.keys() - first.keys()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """The tokens of one place on one rank; all arrays are (T)."""

    valid: np.ndarray
    is_other: np.ndarray
    is_near_tie: np.ndarray
    is_reordered: np.ndarray
    margin: np.ndarray
    weight_change: np.ndarray


def _compare_place(
    key: RouteKey, first: list[Routes], second: list[Routes], tie: float
) -> list[_Tokens]:
    if len(first) != len(second):
        raise ValueError(
            f"one trace comes from {len(first)} ranks, the other from {len(second)}; compare runs on equal ranks"
        )
    found = []
    for a, b in zip(first, second, strict=True):
        if a.ids.shape != b.ids.shape:
            raise ValueError(
                f"{key} has {_size(a)} in one trace and {_size(b)} in the other; compare runs with equal batches "
                "and equal model.moe.router.top_k"
            )
        if not np.array_equal(a.valid, b.valid):
            raise ValueError(f"{key} has other valid tokens in each trace: the runs had other data")
        found.append(_compare_tokens(a, b, tie))
    return found


def _compare_tokens(a: Routes, b: Routes, tie: float) -> _Tokens:
    ids_a, ids_b = a.ids.astype(np.int64), b.ids.astype(np.int64)
    is_same = (ids_a == ids_b).all(axis=1)
    is_other = (np.sort(ids_a) != np.sort(ids_b)).any(axis=1) & a.valid
    margin = np.maximum(a.margins, b.margins).astype(np.float64)
    change = np.abs(a.weights.astype(np.float64) - b.weights.astype(np.float64)).max(axis=1)
    return _Tokens(
        valid=a.valid,
        is_other=is_other,
        is_near_tie=is_other & (margin <= tie),
        is_reordered=a.valid & ~is_same & ~is_other,
        margin=margin,
        weight_change=np.where(is_same & a.valid, change, 0.0),
    )


def _layer(layer: int, places: list[_Tokens]) -> LayerDifference:
    def count(of: Iterable[np.ndarray]) -> int:
        return sum(int(flags.sum()) for flags in of)

    margins = np.concatenate([place.margin[place.is_other] for place in places])
    return LayerDifference(
        layer=layer,
        num_tokens=count(place.valid for place in places),
        num_other=count(place.is_other for place in places),
        num_near_ties=count(place.is_near_tie for place in places),
        num_reordered=count(place.is_reordered for place in places),
        largest_margin=float(margins.max()) if len(margins) else math.nan,
        weight_change=max(float(place.weight_change.max(initial=0)) for place in places),
    )


def _first_difference(
    first: Trace, second: Trace, places: dict[RouteKey, list[_Tokens]]
) -> FirstDifference | None:
    for number, (key, ranks) in enumerate(places.items()):
        for rank, tokens in enumerate(ranks):
            if not tokens.is_other.any():
                continue
            token = int(tokens.is_other.argmax())
            both = (first[key][rank], second[key][rank])
            ids_a, ids_b = (routes.ids[token].tolist() for routes in both)
            weights_a, weights_b = (routes.weights[token].tolist() for routes in both)
            margin_a, margin_b = (float(routes.margins[token]) for routes in both)
            return FirstDifference(
                key=key,
                rank=rank,
                token=token,
                num_tokens=sum(int(other.is_other.sum()) for other in ranks),
                num_near_ties=sum(int(other.is_near_tie.sum()) for other in ranks),
                ids=(ids_a, ids_b),
                weights=(weights_a, weights_b),
                margins=(margin_a, margin_b),
                equal_before=number,
            )
    return None


def _why(first: FirstDifference, tie: float) -> str:
    if first.num_near_ties == first.num_tokens:
        return (
            f"Rounding decided: where the traces part first, all {first.num_tokens} tokens that differ had margins of "
            f"at most {tie:g}. Other kernels, threads, ranks or precisions do that; later differences follow from it."
        )
    real = first.num_tokens - first.num_near_ties
    blame = (
        "It is the first place that was traced: compare seeds, data and options, or trace earlier steps."
        if not first.equal_before
        else f"The {first.equal_before} places before it agree: look at what happens in between."
    )
    return (
        f"More than rounding: where the traces part first, {real} of {first.num_tokens} tokens that differ had a "
        f"margin above {tie:g}, so the scores themselves have changed. {blame}"
    )


def _span(trace: Trace) -> str:
    steps = sorted({key.step for key in trace})
    layers = sorted({key.layer for key in trace})
    return f"steps {steps} of layers {layers}"


def _size(routes: Routes) -> str:
    num_tokens, top_k = routes.ids.shape
    return f"{num_tokens} tokens with {top_k} experts each"
