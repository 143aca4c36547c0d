"""The page says what the files say, names what a run doesn't have, and refers to nothing outside itself."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_moe.cli import main
from lightning_moe.config import (
    LayerConfig,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
    to_mapping,
)
from lightning_moe.report import read_run, run_page
from tests.kit.run_folder import HISTORY, METRICS, make_run

SECTIONS = {
    "overview": "Overview",
    "loss": "Loss",
    "balance": "Balance",
    "load": "Load of every expert",
    "load-over-time": "Load over time",
    "dead-experts": "Dead experts",
    "drops": "Dropped copies",
    "ranks": "Load of every rank",
    "router": "How sure the router is",
    "throughput": "Throughput",
    "options": "Options",
}


class _Page(HTMLParser):
    """Text and charts of each section, tags that were left open, and addresses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.charts: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.addresses += [given[name] or "" for name in ("src", "href") if name in given]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if tag == "section":
            self._section = str(given["id"])
            self.sections[self._section] = ""
            self.charts[self._section] = []
        if tag == "svg":
            assert given["role"] == "img"
            self.charts[self._section].append(str(given["aria-label"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += f"{data} "


def _read(folder: Path) -> _Page:
    return _Page(run_page(read_run(folder)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> _Page:
    return _read(make_run(tmp_path_factory.mktemp("report") / "RUN"))


def test_every_section_is_there_in_order_with_its_title(page: _Page) -> None:
    assert list(page.sections) == list(SECTIONS)
    for name, title in SECTIONS.items():
        assert page.sections[name].startswith(title)
        assert "Not in this run" not in page.sections[name]


def test_the_page_is_well_formed_and_needs_nothing_else(page: _Page) -> None:
    assert page.open == []
    assert page.tags & {"script", "iframe", "object"} == set()
    assert page.addresses
    assert all(address.startswith(("#", "data:")) for address in page.addresses)


def test_its_style_imports_nothing_and_knows_both_colour_schemes(tmp_path: Path) -> None:
    html = run_page(read_run(make_run(tmp_path)))
    assert not re.search(r"url\(|@import|https?:", html)
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        ("overview", "optimizer steps 4 of 8 planned"),
        ("overview", "train cross-entropy 2.031 "),
        ("overview", "validation cross-entropy 2.688 nats per token; best 2.688"),
        ("overview", "validation bits per byte 3.875"),
        # The median of 5125 and 7250.
        ("overview", "tokens per second 6,188 "),
        ("overview", "busiest expert / mean 1.688 "),
        ("overview", "dead experts 1 of 8 in 2 layers"),
        # 6 of 32 + 32 copies.
        ("overview", "dropped copies 9.38 % "),
        ("overview", "skipped steps 1 "),
        ("overview", "3 layers of width 24; 4 experts, top-2; 2 device(s)"),
        # Layer 0: 5, 22, 0, 5 of 32, around a mean of 8.
        ("load", "0 4 2.75 0 1 "),
        ("load", "1 4 1 1 0 "),
        ("dead-experts", "0 1 of 4 2 "),
        # Ranks: 21 + 16 and 5 + 16, around a mean of 29.
        ("ranks", "0 1.276 "),
        ("ranks", "1 0.7241 "),
        ("options", "name: by_hand"),
    ],
)
def test_a_number_of_the_files_is_shown(page: _Page, section: str, shown: str) -> None:
    text = " ".join(page.sections[section].split())
    assert shown.strip() in text, text


@pytest.mark.parametrize(
    ("section", "chart"),
    [
        ("loss", "Cross-entropy. train: 5.25 to 2.031; validation: 4.5 to 2.688"),
        ("loss", "Gradient norm before clipping. gradient norm: 2 to 1"),
        ("balance", "Balance loss by layer. layer 0: 1.5 to 0.875; layer 1: 1 to 1"),
        ("balance", "Busiest expert over the mean. layer 0: 3 to 1.625"),
        (
            "load",
            "Load over the last 4 records. 2 rows, 4 columns of load / mean load; lowest 0, highest 2.75",
        ),
        (
            "load-over-time",
            "Layer 0. 4 rows, 4 columns of load / mean load; lowest 0, highest 3.5",
        ),
        ("dead-experts", "Experts without a token, by record. layer 0: 1 to 2; layer 1: 0 to 0"),
        # 3 of 8 in the last step.
        ("drops", "Share of copies that were dropped. layer 0: 0 to 0.375; layer 1: 0 to 0"),
        ("drops", "Tokens that lost all their copies. layer 0: 0 to 1; layer 1: 0 to 0"),
        ("ranks", "Busiest rank over the mean. layer 0: 1.5 to 1.6; layer 1: 1 to 1"),
        ("router", "Margin of the choice. layer 0: 0.125 to 0.5; layer 1: 0.0625 to 0.0625"),
        ("router", "Entropy of the scores. layer 0: 1.25 to 0.5; layer 1: 1.375 to 1.375"),
        ("throughput", "Tokens per second. tokens per second: 1,000 to 7,250"),
    ],
)
def test_a_chart_shows_a_series_and_says_so_to_a_screen_reader(
    page: _Page, section: str, chart: str
) -> None:
    assert chart in page.charts[section]


def test_what_a_run_does_not_have_is_said(tmp_path: Path) -> None:
    metrics = "epoch,step,val/ce\n0,3,2.5\n"
    page = _read(make_run(tmp_path, metrics=metrics, config=None, history=None))
    assert list(page.sections) == list(SECTIONS)
    absent = {name for name, text in page.sections.items() if "Not in this run: " in text}
    assert absent == set(SECTIONS) - {"overview", "loss"}
    assert "there is no routing_history.npz" in page.sections["load"]
    assert "train/tokens_per_second was not logged" in page.sections["throughput"]
    assert "train cross-entropy n/a" in " ".join(page.sections["overview"].split())


def test_a_run_without_drops_and_on_one_rank_says_so(tmp_path: Path) -> None:
    history = {
        "steps": np.arange(3),
        "requested_0": np.full((3, 2), 5),
        "kept_0": np.full((3, 2), 5),
        "rank_load_0": np.full((3, 1), 10),
    }
    page = _read(make_run(tmp_path, history=history))
    assert "Nothing was dropped" in page.sections["drops"]
    assert "its experts were not spread over ranks" in page.sections["ranks"]
    assert "margins were not recorded" in page.sections["router"]
    assert "No expert was without a token" in page.sections["dead-experts"]


def test_an_expert_is_dead_without_a_single_token_in_the_last_100_records(tmp_path: Path) -> None:
    counts = np.zeros((101, 3), dtype=np.int64)
    # Expert 1 had its only token before them, expert 2 in the first of them.
    counts[:, 0], counts[0, 1], counts[1, 2] = 5, 1, 1
    page = _read(make_run(tmp_path, history={"steps": np.arange(101), "requested_0": counts}))
    assert "0 1 of 3 1" in " ".join(page.sections["dead-experts"].split())


def _watched(balance: list[float], load: list[list[int]]) -> dict[str, np.ndarray]:
    counts = np.array(load)
    return {
        "steps": 10 * np.arange(len(counts)) + 9,
        "requested_0": counts,
        "balance_0": np.array(balance),
    }


def test_the_report_remarks_on_what_the_alarm_finds_in_the_history(tmp_path: Path) -> None:
    even, uneven = [50_000] * 4, [80_000, 80_000, 20_000, 20_000]
    # The loss is content for three records in a row, from the third to the fifth.
    bad = _watched([1.0, 1.0, 0.9, 0.9, 0.9], [even, even, uneven, uneven, uneven])
    page = _read(make_run(tmp_path, history=bad))
    assert "From step 49 on" in page.sections["balance"]
    # A load above 1.5 times the mean with a loss just below 1 isn't suspicious to the alarm.
    fine = _watched([0.999] * 5, [uneven] * 5)
    assert "gerrymandering" not in _read(make_run(tmp_path, history=fine)).sections["balance"]


def _model(*routers: RouterConfig) -> str:
    """Options of a model with these MoE layers, after a dense one."""
    layers = {i: LayerConfig(moe=_moe(router)) for i, router in enumerate(routers, start=1)}
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=1 + len(routers),
        dense_hidden_size=8,
        layer_overrides=layers,
    )
    return yaml.safe_dump({"model": to_mapping(config)})


def _moe(router: RouterConfig) -> MoEConfig:
    return MoEConfig(num_experts=4, hidden_size=8, router=router)


def test_the_report_judges_each_layer_by_its_own_options(tmp_path: Path) -> None:
    even, uneven = [50_000] * 4, [80_000, 80_000, 20_000, 20_000]
    bad = _watched([1.0, 1.0, 0.9, 0.9, 0.9], [even, even, uneven, uneven, uneven])
    fine = {"requested_1": np.array([even] * 5), "balance_1": np.ones(5)}
    # A layer that only its bias balances can't be fooled.
    bias, loss = RouterConfig(bias_gamma=1e-3), RouterConfig(lb_loss_weight=0.1)
    for routers, is_remarked in (((loss, bias), True), ((bias, loss), False)):
        run = make_run(tmp_path, history=bad | fine, config=_model(*routers))
        assert ("From step 49 on" in _read(run).sections["balance"]) == is_remarked
    # Options of another model say nothing of this one.
    page = _read(make_run(tmp_path, history=bad, config=_model(bias, bias)))
    assert "From step 49 on" in page.sections["balance"]


def test_without_a_history_the_report_remarks_on_what_the_alarm_logged(tmp_path: Path) -> None:
    header = "epoch,step,train/balance_loss,train/gerrymandered_layers\n"
    rows = [f"0,{step},0.5,{layers}\n" for step, layers in enumerate((0, 2, 1, 0, 1))]
    page = _read(make_run(tmp_path, metrics=header + "".join(rows), history=None))
    assert "From step 1, 4 on" in page.sections["balance"]
    page = _read(make_run(tmp_path, metrics=header + rows[0], history=None))
    assert "gerrymandering" not in page.sections["balance"]


def test_ranks_that_a_resumed_run_did_not_have_are_not_idle(tmp_path: Path) -> None:
    loads = np.array([[6, 2], [6, 2], [8, -1]])
    history = {
        "steps": np.arange(3),
        "requested_0": np.full((3, 2), 4),
        "rank_load_0": loads,
    }
    page = _read(make_run(tmp_path, history=history))
    assert any("1.5 to 1.5" in line for line in page.charts["ranks"])


def test_lines_of_many_layers_become_lowest_median_and_highest(tmp_path: Path) -> None:
    history = {"steps": np.arange(2)}
    for layer in range(9):
        history |= {
            f"requested_{layer}": np.ones((2, 3), dtype=np.int64),
            f"margin_{layer}": np.array([0.5, layer / 8]),
        }
    page = _read(make_run(tmp_path, history=history))
    assert page.charts["router"] == [
        "Margin of the choice. highest layer: 0.5 to 1; median layer: 0.5 to 0.5; lowest layer: 0.5 to 0"
    ]
    assert "1 more layers" in page.sections["load-over-time"]


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    metrics = "epoch,step,train/ce\n0,0,4.0\n0,1,nan\n0,2,inf\n0,3,3.0\n0,4,2.0\n"
    html = run_page(read_run(make_run(tmp_path, metrics=metrics, history=None)))
    (path,) = re.findall(r'<path class="line c0" d="([^"]*)"', html)
    assert path.count("M") == 2
    assert path.count("L") == 1
    assert "nan" not in path


def test_names_from_the_files_cannot_inject_tags(tmp_path: Path) -> None:
    html = run_page(read_run(make_run(tmp_path, config="name: <script>alert(1)</script>\n")))
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_the_command_writes_report_html_into_the_folder_or_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "RUN")
    assert main(["report", str(run)]) == 0
    assert f"{run / 'report.html'}: " in capsys.readouterr().out
    assert list(_Page((run / "report.html").read_text()).sections) == list(SECTIONS)
    assert main(["report", str(run), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_text() == (run / "report.html").read_text()
    assert sorted(path.name for path in run.iterdir()) == [
        "config.yaml",
        "metrics.csv",
        "report.html",
        "routing_history.npz",
    ]


def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert main(["report", str(run)]) == 0
    (run / "metrics.csv").write_text(METRICS + "0,4,1.0,1.5,1.0,1.5,1.5,2.0,1,8000.0,1.0,,\n")
    assert main(["report", str(run)]) == 0
    assert "optimizer steps 5 " in " ".join(
        _Page((run / "report.html").read_text()).sections["overview"].split()
    )


def test_a_history_with_a_row_too_few_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, history=HISTORY | {"margin_1": np.zeros(3)})
    with pytest.raises(ValueError, match=r"routing_history\.npz is damaged: its arrays"):
        read_run(run)
