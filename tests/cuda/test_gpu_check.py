"""The checks for a GPU, run without one: all of their code but the kernels."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda.table import row
from tests.cuda.values import Values
from tests.gpu import check, training
from tests.gpu.measure import Result, Size
from tests.unit.test_gpu_check import SHORT

SMALL = Size(tokens=128, width=64, hidden=64, experts=8, top_k=2)


def _skipped(size: Size, linears: str | None, device: object) -> Result:
    return Result(check="speed", subject=f"linears {linears}", passed=None, detail="compiled")


@pytest.mark.filterwarnings("ignore")
def test_all_checks_for_a_gpu_pass_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = tuple(way for way in training.WAYS if way != "compiled")
    monkeypatch.setattr(check, "ACCURACY", SMALL)
    monkeypatch.setattr(check, "SPEED", SMALL)
    monkeypatch.setattr(check, "TRAINING", replace(SHORT, ways=ways))
    # Compiled kernels run nowhere and have no operators that could stand for them.
    monkeypatch.setattr(check, "linear_speed", _skipped)
    with Values():
        assert check.main(["--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    results = {(result["check"], result["subject"]): result for result in found["results"]}
    for key in (("graph", "static"), ("no host sync", "static"), ("training", "fp8_rowwise")):
        assert results[key]["passed"], results[key]
    assert results["training", "static"]["numbers"].keys() == {
        "tokens_per_second",
        "share_of_matmul_rate",
        "peak_gib",
    }
    for result in found["results"]:
        words = {True: "passed", False: "FAILED", None: "skipped"}[result["passed"]]
        row(f"gpu check: {result['check']}", {}, f"{result['subject']}: {words}")
