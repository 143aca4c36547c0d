"""What pages name is there: files, folders and functions of the repository, and where links of the README lead."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.style.source import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_PATH = re.compile(r"`((?:lightning_moe|conf|docs|examples|tests)/[\w./-]*)`")
_LINK = re.compile(r"\]\(([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (tests\.[\w.]+)", text)]
    missing = [name for name in (*_PATH.findall(text), *modules) if not (ROOT / name).exists()]
    assert missing == []


# mkdocs checks the links of docs/.
@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_of_pages_outside_docs_lead_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if not link.startswith("https://")]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    docs = ROOT / "docs"
    assert {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} == named


def _functions(path: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{member.name}" for member in members}
    return names


def test_a_walk_of_the_map_has_at_most_ten_stops_and_each_is_a_function_that_exists() -> None:
    _, *walks = re.split(r"^## Walk: ", (ROOT / "docs" / "map.md").read_text(), flags=re.MULTILINE)
    assert len(walks) == 4
    for walk in walks:
        stops = re.findall(r"^\d+\. (.*)", walk, re.MULTILINE)
        found = [re.match(r"`([\w/]+\.py): ([\w.]+)`", stop) for stop in stops]
        assert 5 <= len(stops) <= 10, walk.splitlines()[0]
        for stop, match in zip(stops, found, strict=True):
            assert match is not None, f"no `file.py: function` at the start of: {stop}"
            assert match[2] in _functions(ROOT / "lightning_moe" / match[1]), stop


def test_the_map_lists_the_layers_in_the_order_that_imports_are_checked_against() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    checked = [set(row.split(" | ")) for row in contracts["contracts"][0]["layers"]]
    rows = re.findall(r"^\| (`[\w./`, ]+) \|", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE)
    shown = [set(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert [*shown, {"__main__"}] == checked[::-1]


def test_each_example_of_extending_is_under_40_lines() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    assert max(len(block.splitlines()) for block in blocks) < 40
