"""The report in a real browser, in both colour schemes. Skipped where there is no Chromium."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from lightning_moe.cli import main
from tests.kit.run_folder import make_run

BACKGROUND = {"light": (246, 247, 248), "dark": (18, 22, 27)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    with playwright.sync_playwright() as started:
        own = Path(started.chromium.executable_path)
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", own))), None)
        if path is None:
            pytest.skip(f"no Chromium: neither `chromium` on the PATH nor {own}")
        # As root, which CI often is, Chromium starts without its sandbox only.
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("scheme", BACKGROUND)
def test_the_page_is_shown_without_errors_or_requests_in_both_colour_schemes(
    browser: Any,  # playwright may be missing
    tmp_path: Path,
    scheme: str,
) -> None:
    assert main(["report", str(make_run(tmp_path))]) == 0
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1000, "height": 800})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    address = (tmp_path / "report.html").as_uri()
    page.goto(address)
    assert said == [address]

    sections = page.locator("section")
    assert sections.count() == 11
    for number in range(sections.count()):
        assert sections.nth(number).is_visible()
    for chart in page.locator("svg").all():
        box = chart.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 100
    # Nothing sticks out to the right.
    assert page.evaluate("document.documentElement.scrollWidth") == 1000
    page.get_by_text("config.yaml", exact=True).click()
    assert page.get_by_text("name: by_hand").is_visible()

    shot = tmp_path / f"{scheme}.png"
    page.screenshot(path=shot)
    pixels = np.round(255 * imread(shot)[..., :3]).astype(int).reshape(-1, 3)
    assert tuple(pixels[0]) == BACKGROUND[scheme]
    # Text, lines and their soft edges: a blank page has one colour.
    assert len(np.unique(pixels, axis=0)) > 50
    page.close()


def test_the_page_fits_on_a_phone(browser: Any, tmp_path: Path) -> None:
    assert main(["report", str(make_run(tmp_path))]) == 0
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
