"""The page itself: a style for light and dark, sections, tables, and headline numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

NUM_COLOURS: Final = 8
"""How many lines of a chart have colours of their own; further ones begin again."""

_STYLE: Final = """
:root { color-scheme: light dark; --page: #f6f7f8; --card: #ffffff; --ink: #1a1f26; --muted: #56606c; --grid: #e4e7eb;
  --axis: #aab2bd; --warn: #8a4b00; --warn-back: #fff3df; --c0: #1f5ca6; --c1: #c2570c; --c2: #1a7f4b; --c3: #8a3ffc;
  --c4: #b02a5b; --c5: #0f7d86; --c6: #7a6a00; --c7: #5a6472; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2027; --ink: #e7eaee; --muted: #a1abb8; --grid: #2b323c; --axis: #566170;
    --warn: #ffc46b; --warn-back: #3a2b12; --c0: #6db1ff; --c1: #ff9d5c; --c2: #5fd39a; --c3: #c3a0ff; --c4: #ff8fb4;
    --c5: #54cfd8; --c6: #dfcb4f; --c7: #b3bcc8; }
  /* Turns the neutral middle of a heat map dark, and keeps blue blue and red red. */
  .cells, .ramp { filter: invert(1) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.6rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 4px; }
header p, section > p { color: var(--muted); margin: 0 0 14px; max-width: 78ch; }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 12px 0 0; list-style: none; }
a { color: var(--c0); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; margin: 0; }
.tiles div { border: 1px solid var(--grid); border-radius: 8px; padding: 10px 12px; }
.tiles dt { color: var(--muted); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tiles dd small { display: block; font-size: .78rem; color: var(--muted); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 22px 26px;
  align-items: start; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .92rem; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--muted); font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.cells { image-rendering: pixelated; }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.reference { stroke: var(--muted); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 14px; margin: 4px 0 0; padding: 0;
  list-style: none; font-size: .82rem; color: var(--muted); }
.key { display: inline-block; width: 18px; height: 3px; margin-right: 6px; vertical-align: middle; border-radius: 2px; }
.ramp { display: inline-block; width: 160px; height: 10px; border-radius: 3px;
  background: linear-gradient(90deg, rgb(31 92 166), rgb(243 241 238), rgb(178 36 40)); }
.absent { border-left: 3px solid var(--axis); padding: 4px 12px; color: var(--muted); margin: 0; }
.warning { border-left: 3px solid var(--warn); background: var(--warn-back); color: var(--warn); padding: 6px 12px;
  border-radius: 4px; margin: 0 0 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--muted); font-weight: 600; white-space: normal; vertical-align: bottom; line-height: 1.25; }
pre { overflow-x: auto; font-size: .8rem; } summary { cursor: pointer; color: var(--c0); }
@media print { section { break-inside: avoid; } }
""" + "".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .dot.c{n} {{ fill: var(--c{n}); }}"
    f" .key.c{n} {{ background: var(--c{n}); }}\n"
    for n in range(NUM_COLOURS)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the page.

    Attributes:
        name: its anchor.
        title: its heading.
        about: what a reader should look for.
        content: HTML; empty if the run has nothing to show here.
        absent: why there may be nothing.
    """

    name: str
    title: str
    about: str
    content: str
    absent: str


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """A whole HTML document that refers to nothing outside itself."""
    links = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of its own, or browsers ask a server for one.
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>\n'
        f"<body><main><header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>"
        f'<nav aria-label="sections"><ul>{links}</ul></nav></header>\n'
        f"{''.join(_section(s) for s in sections)}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    content = section.content or f'<p class="absent">Not in this run: {escape(section.absent)}</p>'
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>'
        f"<p>{escape(section.about)}</p>{content}</section>\n"
    )


def tiles(numbers: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers: name, value, note."""
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in numbers
    )
    return f'<dl class="tiles">{"".join(items)}</dl>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def warning(text: str) -> str:
    """A remark that stands out."""
    return f'<p class="warning">{escape(text)}</p>'


def charts(*figures: str) -> str:
    """Charts and tables side by side where there is room."""
    return f'<div class="charts">{"".join(figures)}</div>'


def details(summary: str, content: str) -> str:
    """Something that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
