"""The sections about routing: load, dead experts, drops, ranks, margins."""

import numpy as np

from lightning_moe.report.charts import heat_map, line_chart
from lightning_moe.report.page import NUM_COLOURS, Section, charts, details, table
from lightning_moe.report.routing import RECENT, LayerRouting, load_by_time, over_mean
from lightning_moe.report.scale import short
from lightning_moe.report.series import Series

MAX_PICTURES = 8
"""Layers whose load over time is shown at once; the others open on a click."""

_NO_HISTORY = (
    "there is no routing_history.npz in its folder; the callback ExpertLoadMonitor writes it."
)


def routing_sections(layers: list[LayerRouting]) -> list[Section]:
    """All of them, from the layers of the model; none if the run has no history."""
    return [
        _load(layers),
        _load_over_time(layers),
        _dead_experts(layers),
        _drops(layers),
        _ranks(layers),
        _router(layers),
    ]


def by_layer(layers: list[LayerRouting], field: str) -> dict[str, Series]:
    """A field of `LayerRouting` as one line per layer that has it."""
    lines = {
        f"layer {number}": layer.series(getattr(layer, field))
        for number, layer in enumerate(layers)
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


def _load(layers: list[LayerRouting]) -> Section:
    content = ""
    if layers:
        loads = [layer.recent_load_E(RECENT) for layer in layers]
        picture = np.full((len(loads), max(map(len, loads))), np.nan)
        for row, load_E in zip(picture, loads, strict=True):
            row[: len(load_E)] = load_E
        picture_of_all = heat_map(
            f"Load over the last {min(RECENT, len(layers[0].steps))} records",
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


def _load_over_time(layers: list[LayerRouting]) -> Section:
    pictures = [
        heat_map(
            f"Layer {number}",
            load_by_time(layer),
            y_label="expert",
            x_label="optimizer step",
            x_range=(float(layer.steps[0]), float(layer.steps[-1])),
        )
        for number, layer in enumerate(layers)
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


def _dead_experts(layers: list[LayerRouting]) -> Section:
    content = ""
    if layers:
        lines = few_lines(
            {
                f"layer {number}": layer.series((layer.requested_SE == 0).sum(axis=1))
                for number, layer in enumerate(layers)
            }
        )
        rows = [
            [str(number), f"{len(dead)} of {layer.num_experts}", _listed(dead)]
            for number, layer in enumerate(layers)
            if (dead := layer.dead_experts(RECENT))
        ]
        num_records = min(RECENT, len(layers[0].steps))
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


def _drops(layers: list[LayerRouting]) -> Section:
    shares = {
        f"layer {number}": layer.series(layer.dropped_share_S())
        for number, layer in enumerate(layers)
        if layer.kept_SE is not None
    }
    lost = by_layer(layers, "lost_tokens_S")
    content = ""
    if shares and not any(series.values.any() for series in shares.values()):
        content = "<p>Nothing was dropped: every requested route was computed.</p>"
    elif shares:
        parts = [
            line_chart("Share of routes that were dropped", few_lines(shares), y_label="share")
        ]
        if lost:
            parts.append(
                line_chart("Tokens that lost all their routes", lost, y_label="tokens per record")
            )
        content = charts(*parts)
    return Section(
        name="drops",
        title="Dropped routes",
        about="Routes beyond an expert's capacity are not computed. A token that loses all of its routes passes "
        "the layer with its shared expert alone, or unchanged.",
        content=content,
        absent=_NO_HISTORY if not layers else "kept routes were not recorded.",
    )


def _ranks(layers: list[LayerRouting]) -> Section:
    spread = [
        (number, layer)
        for number, layer in enumerate(layers)
        if layer.rank_load_SR is not None and layer.rank_load_SR.shape[1] > 1
    ]
    content = ""
    if spread:
        lines = {
            f"layer {number}": layer.series(over_mean(layer.rank_load_SR).max(axis=1))
            for number, layer in spread
            if layer.rank_load_SR is not None
        }
        sums = sum(
            np.nansum(layer.rank_load_SR[-RECENT:], axis=0)
            for _, layer in spread
            if layer.rank_load_SR is not None
        )
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
        absent="its experts were not spread over ranks." if layers else _NO_HISTORY,
    )


def _router(layers: list[LayerRouting]) -> Section:
    margin, entropy = by_layer(layers, "margin_S"), by_layer(layers, "entropy_S")
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
        absent=_NO_HISTORY if not layers else "margins were not recorded.",
    )
