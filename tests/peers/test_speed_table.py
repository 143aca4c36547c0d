"""The race with transformers runs, compares only equals and says what it compared. No time is checked."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

# The same rule as in tests/parity: without transformers these fail, but only when they are selected.
pytestmark = pytest.mark.parity

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return importlib.import_module("tests.peers.speed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """What a short race prints, and its rows."""
    file = tmp_path_factory.mktemp("speed") / "rows.json"
    command = [
        sys.executable,
        "-m",
        "tests.peers.speed",
        "--rounds",
        "2",
        "--shapes",
        "small",
        "--threads",
        "1",
    ]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_each_work_meets_each_block_with_equal_allocators_and_by_default_and_a_dense_layer_once(
    run: tuple[str, list[dict[str, Any]]],
) -> None:
    printed, rows = run
    works = ["forward", "forward + backward", "training step"]
    assert [row["work"] for row in rows] == [work for work in works for _ in range(5)]
    assert all(work in printed for work in works)
    assert [row["comparison"] for row in rows] == 3 * [
        "OLMoE grouped_mm, freed memory kept by both",
        "OLMoE grouped_mm, defaults",
        "Qwen3-MoE grouped_mm, freed memory kept by both",
        "Qwen3-MoE grouped_mm, defaults",
        "dense SwiGLU of K * F",
    ]


def test_rows_carry_equal_hashes_and_the_routing(run: tuple[str, list[dict[str, Any]]]) -> None:
    printed, rows = run
    assert len({row["inputs_hash"] for row in rows}) == 1
    dense = [row for row in rows if row["comparison"].startswith("dense")]
    assert {row["weights_hash"] for row in dense} == {""}
    assert len({row["weights_hash"] for row in rows}) == 2
    assert all(1 <= row["load_max_over_mean"] <= 8 for row in rows)
    assert rows[0]["inputs_hash"] in printed
    assert rows[0]["weights_hash"] in printed
    assert "learned router" in printed


def test_ratios_are_medians_within_their_range(run: tuple[str, list[dict[str, Any]]]) -> None:
    printed, rows = run
    assert all(0 < row["lowest"] <= row["ratio"] <= row["highest"] for row in rows)
    assert "too few to quote" in printed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs_hash": "other"}, "the inputs differ"),
        ({"weights_hash": "other"}, "the weights differ"),
        ({"y": np.array([1.0, 2.1])}, "the results differ by 4.8e-02"),
        ({"grad_x": np.array([np.nan, 1.0])}, "the results differ by nan"),
    ],
)
def test_there_is_no_ratio_between_unequal_contestants(
    speed: ModuleType, changed: dict[str, Any], message: str
) -> None:
    fields = {
        "inputs_hash": "a",
        "weights_hash": "b",
        "y": np.array([1.0, 2.0]),
        "grad_x": np.array([0.5, 1.0]),
        "load_max_over_mean": 1.0,
    }
    ours, other = speed.Facts(**fields), speed.Facts(**{**fields, **changed})
    with pytest.raises(RuntimeError, match=message):
        speed.difference(speed.comparisons()[0], ours, other)
