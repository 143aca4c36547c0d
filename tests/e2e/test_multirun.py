"""A Hydra sweep over jobs of two ranks: each job has its own children, one folder, its own options on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _sweep(folder: Path, *command: str) -> list[Path]:
    """The folders of the jobs, in order."""
    done = subprocess.run(
        [sys.executable, *command, f"hydra.sweep.dir={folder}/sweep"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A child that runs a sweep of its own would write elsewhere.
    assert [path.name for path in folder.iterdir()] == ["sweep"]
    return sorted(path for path in (folder / "sweep").iterdir() if path.is_dir())


def test_each_job_of_a_users_script_has_its_own_options_on_every_rank(tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "e2e" / "hydra_script.py")
    jobs = _sweep(tmp_path, script, "-m", "lr=0.01,0.02")
    assert len(jobs) == 2
    drawn = []
    for job, rate in zip(jobs, (0.01, 0.02), strict=True):
        first, second = (json.loads((job / f"rank-{rank}.json").read_text()) for rank in range(2))
        assert first == second
        assert first["lr"] == rate
        drawn.append(first["drawn"])
    assert drawn[0] != drawn[1]
