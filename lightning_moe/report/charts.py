"""Charts as inline SVG: lines, and heat maps. Colours come from the page's style sheet, light or dark."""

import base64
from collections.abc import Sequence
from html import escape

import numpy as np

from lightning_moe.report.chart_scale import Scale, short, ticks
from lightning_moe.report.page import NUM_COLOURS
from lightning_moe.report.png import indexed_png
from lightning_moe.report.series import Series

WIDTH, HEIGHT = 560.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 14.0, 12.0, 42.0
MAX_POINTS = 600
MAX_DOTS = 40


def line_chart(
    title: str,
    lines: dict[str, Series],
    *,
    y_label: str,
    x_label: str = "optimizer step",
    reference: float | None = None,
) -> str:
    """Named lines over steps.

    Args:
        title: the caption.
        lines: by name; empty ones are left out.
        y_label: of the vertical axis, with its unit.
        x_label: of the horizontal one.
        reference: a dashed horizontal line, e.g. what would be even.
    """
    lines = {name: _thinned(series) for name, series in lines.items() if len(series)}
    everything = np.concatenate([series.values for series in lines.values()])
    if reference is not None:
        everything = np.append(everything, reference)
    steps = np.concatenate([series.steps for series in lines.values()]).astype(np.float64)
    x = Scale.around(steps, start=LEFT, end=WIDTH - RIGHT)
    y = Scale.around(everything, start=HEIGHT - BOTTOM, end=TOP)
    body = _axes(x, y, x_label, y_label)
    if reference is not None:
        body.append(_horizontal("reference", x, y(reference)))
    for number, (name, series) in enumerate(lines.items()):
        body += _line(name, series, x, y, number % NUM_COLOURS)
    summary = "; ".join(
        f"{name}: {short(float(series.values[0]))} to {short(series.last)}"
        for name, series in lines.items()
    )
    return _figure(title, _svg(title, summary, HEIGHT, body), _legend(list(lines)))


def scatter(
    title: str, points: dict[str, tuple[float, float]], *, x_label: str, y_label: str
) -> str:
    """Points with their names beside them.

    Args:
        title: the caption.
        points: by name, across and up.
        x_label: of the horizontal axis, with its unit.
        y_label: of the vertical one.
    """
    places = np.array(list(points.values()), dtype=np.float64)
    # Room for dots and names at the edges.
    x = Scale.around(places[:, 0], start=LEFT + 8, end=WIDTH - RIGHT - 20)
    y = Scale.around(places[:, 1], start=HEIGHT - BOTTOM - 8, end=TOP + 10)
    body = _axes(x, y, x_label, y_label, whole_x=False)
    for name, (across, up) in points.items():
        label = escape(f"{name}: {short(across)}, {short(up)}")
        body += [
            f'<circle class="dot c0" cx="{x(across):.1f}" cy="{y(up):.1f}" r="4"><title>{label}</title></circle>',
            f'<text class="tick" x="{x(across) + 6:.1f}" y="{y(up) - 4:.1f}">{escape(name)}</text>',
        ]
    summary = "; ".join(f"{name}: {short(a)}, {short(b)}" for name, (a, b) in points.items())
    return _figure(title, _svg(title, summary, HEIGHT, body), "")


def heat_map(
    title: str,
    values_YX: np.ndarray,
    *,
    y_label: str,
    x_label: str,
    x_range: tuple[float, float],
    unit: str = "load / mean load",
) -> str:
    """Rows of cells, blue at 0, neutral at 1, red from 2 on; a cell that is NaN stays empty.

    Args:
        title: the caption.
        values_YX: (rows, columns).
        y_label: what a row is.
        x_label: what a column is.
        x_range: of the first and the last column.
        unit: of the values.
    """
    rows, columns = values_YX.shape
    bottom = TOP + min(max(rows * 12, 60), 300)
    x = Scale(low=x_range[0] - 0.5, high=x_range[1] + 0.5, start=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=-0.5, high=rows - 0.5, start=TOP, end=bottom)
    picture = base64.b64encode(indexed_png(_colours(values_YX))).decode()
    body = [
        f'<image class="cells" x="{LEFT}" y="{TOP}" width="{WIDTH - RIGHT - LEFT}" height="{bottom - TOP}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{picture}"/>',
        *_axes(x, y, x_label, y_label, grid=False, whole_y=True),
    ]
    known = values_YX[np.isfinite(values_YX)]
    summary = (
        f"{rows} rows, {columns} columns of {unit}; "
        f"lowest {short(float(known.min()))}, highest {short(float(known.max()))}"
        if known.size
        else "no values"
    )
    return _figure(title, _svg(title, summary, bottom + BOTTOM, body), _colour_key(unit))


def _thinned(series: Series) -> Series:
    """At most `MAX_POINTS` points: means of neighbours, so that no peak is drawn that isn't there for long."""
    size = -(-len(series) // MAX_POINTS)
    if size == 1:
        return series
    groups = range(0, len(series), size)
    values = [float(np.mean(series.values[start : start + size])) for start in groups]
    return Series(steps=series.steps[::size], values=np.array(values))


def _line(name: str, series: Series, x: Scale, y: Scale, colour: int) -> list[str]:
    """A path with gaps where values are not finite, and a dot on every point where there are few."""
    path, dots, pen = [], [], "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if not np.isfinite(value):
            pen = "M"
            continue
        place = f"{x(float(step)):.1f},{y(float(value)):.1f}"
        path.append(f"{pen}{place}")
        pen = "L"
        if len(series) <= MAX_DOTS:
            across, down = place.split(",")
            label = escape(f"{name}, step {step}: {short(float(value))}")
            dots.append(
                f'<circle class="dot c{colour}" cx="{across}" cy="{down}" r="3"><title>{label}</title></circle>'
            )
    return [f'<path class="line c{colour}" d="{"".join(path)}"/>', *dots]


def _axes(
    x: Scale,
    y: Scale,
    x_label: str,
    y_label: str,
    *,
    grid: bool = True,
    whole_y: bool = False,
    whole_x: bool = True,
) -> list[str]:
    left, right, bottom = x.start, x.end, max(y.start, y.end)
    parts = []
    for value in ticks(y.low, y.high):
        if whole_y and value != round(value):
            continue
        if grid:
            parts.append(_horizontal("grid", x, y(value)))
        parts.append(
            f'<text class="tick" text-anchor="end" x="{left - 8}" y="{y(value) + 4:.1f}">{short(value)}</text>'
        )
    parts += [
        f'<text class="tick" text-anchor="middle" x="{x(value):.1f}" y="{bottom + 17}">{short(value)}</text>'
        for value in ticks(x.low, x.high, 6)
        if not whole_x or value == round(value)
    ]
    middle = (y.start + y.end) / 2
    return [
        *parts,
        _horizontal("axis", x, bottom),
        f'<text class="label" text-anchor="middle" x="{(left + right) / 2}" y="{bottom + 35}">{escape(x_label)}</text>',
        f'<text class="label" text-anchor="middle" transform="translate(14 {middle:.1f}) rotate(-90)">'
        f"{escape(y_label)}</text>",
    ]


def _horizontal(kind: str, x: Scale, y: float) -> str:
    return f'<line class="{kind}" x1="{x.start}" x2="{x.end}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _colours(values_YX: np.ndarray) -> np.ndarray:
    """Palette indices: 1 for 0, 101 for 2 and more, 0 (transparent) for NaN."""
    shares = np.clip(np.nan_to_num(values_YX, nan=0.0, posinf=2.0) / 2, 0, 1)
    return np.where(np.isnan(values_YX), 0, 1 + np.round(shares * 100)).astype(np.uint8)


def _svg(title: str, summary: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(f"{title}. {summary}")}">'
        f"{''.join(body)}</svg>"
    )


def _figure(title: str, svg: str, key: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{key}</figure>"


def _legend(names: list[str]) -> str:
    items = (
        f'<li><span class="key c{number % NUM_COLOURS}"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _colour_key(unit: str) -> str:
    return (
        '<p class="legend"><span>0</span><span class="ramp" aria-hidden="true"></span>'
        f"<span>2 and more; {escape(unit)}, 1 is even</span></p>"
    )
