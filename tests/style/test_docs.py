"""What pages name is there: files and folders of the repository, and where links of the README lead."""

import re
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
