"""Every example runs as it stands, is short, and shows what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
# One line of its output per example: a new example must say here what a reader should see.
SHOWN = {
    "expert_parallel.py": "rank 0 holds experts [0, 1, 2, 3]",
    "moe_layer.py": "gradient of the router: (8, 64)",
    "own_module.py": "expert bias:",
    "resume.py": "bit for bit equal: True",
    "token_gerrymandering.py": "balance loss 0.085551, busiest / mean 4.000, dead experts 48 of 64",
    "train_script.py": "bits per byte after 20 steps",
    "what_moves_time.py": "dense, equal active FLOPs",
}


def test_every_example_is_listed_here_and_under_60_lines() -> None:
    scripts = {script.name: len(script.read_text().splitlines()) for script in FOLDER.glob("*.py")}
    assert scripts.keys() == SHOWN.keys()
    assert max(scripts.values()) < 60, scripts


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_example_runs_and_shows_its_point(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
