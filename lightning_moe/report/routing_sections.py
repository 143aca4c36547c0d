"""The sections about routing: load, dead experts, drops, ranks, margins."""

import numpy as np

from lightning_moe.metrics.routing_history import RoutingHistory
from lightning_moe.report.chart_scale import short
from lightning_moe.report.charts import heat_map, line_chart
from lightning_moe.report.page import NUM_COLOURS, Section, charts, details, table
from lightning_moe.report.routing import (
    RECENT,
    dead_experts,
    dropped_share_S,
    known_series,
    load_by_time,
    over_mean,
    recent_load_E,
)
from lightning_moe.report.series import Series

MAX_PICTURES = 8
"""Layers whose load over time is shown at once; the others open on a click."""

_NO_HISTORY = (
    "there is no routing_history.npz in its folder; the callback ExpertLoadMonitor writes it."
)


def routing_sections(history: RoutingHistory) -> list[Section]:
    """All of them; they say so where the run has no history."""
    return [
        _load(history),
        _load_over_time(history),
        _dead_experts(history),
        _drops(history),
        _ranks(history),
        _router(history),
    ]


def by_layer(history: RoutingHistory, field: str) -> dict[str, Series]:
    """A field of `LayerRouting` as one line per layer where it was taken."""
    lines = {
        f"layer {number}": known_series(history.steps_S, getattr(layer, field))
        for number, layer in enumerate(history.layers)
    }
    return few_lines({name: series for name, series in lines.items() if len(series)})


def few_lines(lines: dict[str, Series]) -> dict[str, Series]:
    """The lines as they are, or the lowest, the middle and the highest of too many to tell apart."""
    if len(lines) <= NUM_COLOURS:
        return lines
    by_step: dict[int, list[float]] = {}
    for series in lines.values():
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            by_step.setdefault(step, []).append(value)
    steps = np.array(sorted(by_step))
    return {
        name: Series(steps=steps, values=np.array([choose(by_step[step]) for step in steps]))
        for name, choose in (
            ("highest layer", np.max),
            ("median layer", np.median),
            ("lowest layer", np.min),
        )
    }


def _load(history: RoutingHistory) -> Section:
    content = ""
    if len(history):
        loads = [recent_load_E(layer) for layer in history.layers]
        picture = np.full((len(loads), max(map(len, loads))), np.nan)
        for row, load_E in zip(picture, loads, strict=True):
            row[: len(load_E)] = load_E
        picture_of_all = heat_map(
            f"Load over the last {min(RECENT, len(history))} records",
            picture,
            y_label="MoE layer",
            x_label="expert",
            x_range=(0.0, picture.shape[1] - 1.0),
        )
        numbers = table(
            ["layer", "experts", "busiest / mean", "quietest / mean", "busiest expert"],
            [
                [
                    str(number),
                    str(len(load_E)),
                    short(float(load_E.max())),
                    short(float(load_E.min())),
                    str(int(load_E.argmax())),
                ]
                for number, load_E in enumerate(loads)
            ],
        )
        content = charts(picture_of_all, numbers)
    return Section(
        name="load",
        title="Load of every expert",
        about="Token copies that the router asked of each expert, before any capacity limit.",
        content=content,
        absent=_NO_HISTORY,
    )


def _load_over_time(history: RoutingHistory) -> Section:
    pictures = [
        heat_map(
            f"Layer {number}",
            load_by_time(layer),
            y_label="expert",
            x_label="optimizer step",
            x_range=(float(history.steps_S[0]), float(history.steps_S[-1])),
        )
        for number, layer in enumerate(history.layers)
    ]
    content = charts(*pictures[:MAX_PICTURES]) if pictures else ""
    if len(pictures) > MAX_PICTURES:
        content += details(
            f"{len(pictures) - MAX_PICTURES} more layers", charts(*pictures[MAX_PICTURES:])
        )
    return Section(
        name="load-over-time",
        title="Load over time",
        about="Each row is an expert. Stripes that stay are experts that specialise or starve; a picture that "
        "flickers is a router that has not settled.",
        content=content,
        absent=_NO_HISTORY,
    )


def _dead_experts(history: RoutingHistory) -> Section:
    content = ""
    if len(history):
        lines = few_lines(
            {
                f"layer {number}": known_series(
                    history.steps_S, (layer.requested_SE == 0).sum(axis=1)
                )
                for number, layer in enumerate(history.layers)
            }
        )
        rows = [
            [str(number), f"{len(dead)} of {layer.num_experts}", _listed(dead)]
            for number, layer in enumerate(history.layers)
            if (dead := dead_experts(layer))
        ]
        num_records = min(RECENT, len(history))
        names = (
            table(["layer", f"dead in the last {num_records} records", "which"], rows)
            if rows
            else f"<p>No expert was without a token in all of the last {num_records} records.</p>"
        )
        content = charts(
            line_chart("Experts without a token, by record", lines, y_label="experts"), names
        )
    return Section(
        name="dead-experts",
        title="Dead experts",
        about="Experts that no token asked for: parameters that are stored, reduced and saved, and not trained.",
        content=content,
        absent=_NO_HISTORY,
    )


def _listed(numbers: list[int], most: int = 16) -> str:
    words = ", ".join(map(str, numbers[:most]))
    return f"{words} and {len(numbers) - most} more" if len(numbers) > most else words


def _drops(history: RoutingHistory) -> Section:
    shares = {
        f"layer {number}": known_series(history.steps_S, dropped_share_S(layer))
        for number, layer in enumerate(history.layers)
    }
    lost = by_layer(history, "lost_tokens_S")
    content = ""
    if shares and not any(series.values.any() for series in shares.values()):
        content = "<p>Nothing was dropped: every requested copy was computed.</p>"
    elif shares:
        content = charts(
            line_chart("Share of copies that were dropped", few_lines(shares), y_label="share"),
            line_chart("Tokens that lost all their copies", lost, y_label="tokens per record"),
        )
    return Section(
        name="drops",
        title="Dropped copies",
        about="Token copies beyond an expert's capacity are not computed. A token that loses all of its copies passes "
        "the layer with its shared expert alone, or unchanged.",
        content=content,
        absent=_NO_HISTORY,
    )


def _ranks(history: RoutingHistory) -> Section:
    # Ranks that a resumed run did not have are unknown, not idle.
    spread = {
        f"layer {number}": np.where(layer.rank_load_SR < 0, np.nan, layer.rank_load_SR)
        for number, layer in enumerate(history.layers)
        if layer.rank_load_SR.shape[1] > 1
    }
    content = ""
    if spread:
        lines = {
            name: known_series(history.steps_S, over_mean(load_SR).max(axis=1))
            for name, load_SR in spread.items()
        }
        sums = sum(np.nansum(load_SR[-RECENT:], axis=0) for load_SR in spread.values())
        loads = over_mean(np.asarray(sums))
        content = charts(
            line_chart(
                "Busiest rank over the mean", few_lines(lines), y_label="max / mean", reference=1.0
            ),
            table(
                ["expert rank", "load / mean, all layers, recent records"],
                [[str(rank), short(float(load))] for rank, load in enumerate(loads)],
            ),
        )
    return Section(
        name="ranks",
        title="Load of every rank",
        about="The rank with the most rows sets the time of a layer: the others wait for it.",
        content=content,
        absent="its experts were not spread over ranks." if len(history) else _NO_HISTORY,
    )


def _router(history: RoutingHistory) -> Section:
    margin, entropy = by_layer(history, "margin_S"), by_layer(history, "entropy_S")
    parts = []
    if margin:
        parts.append(line_chart("Margin of the choice", margin, y_label="score"))
    if entropy:
        parts.append(line_chart("Entropy of the scores", entropy, y_label="nats"))
    return Section(
        name="router",
        title="How sure the router is",
        about="The margin is the lead of the last chosen expert over the first one left out. Where it is small, "
        "rounding alone can send a token elsewhere.",
        content=charts(*parts) if parts else "",
        absent="margins were not recorded." if len(history) else _NO_HISTORY,
    )
