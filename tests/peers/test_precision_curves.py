"""The command that compares precisions, with tiny settings."""

import json
from pathlib import Path

import pytest

from tests.peers import precision_curves

pytestmark = pytest.mark.parity


def test_all_precisions_are_trained_compared_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "2", "--batch-size", "1", "--val-batches", "1", "--text", __file__]
    paths = ["--picture", str(tmp_path / "p.png"), "--json", str(tmp_path / "rows.json")]
    rows = precision_curves.main([*options, "--seeds", "0", "1", *paths])
    names = list(precision_curves.RUNS)
    assert [(row.seed, row.name) for row in rows] == [(s, n) for s in (0, 1) for n in names]
    losses = [row.val_ce for row in rows]
    assert len(set(losses)) == len(rows)
    assert losses == pytest.approx([losses[0]] * len(rows), rel=0.05)
    assert "mxfp8 floor" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 0
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["val_ce"] for row in written] == losses
