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


def test_each_job_of_the_command_line_trains_on_two_ranks_with_its_own_options(
    tmp_path: Path,
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "runs").mkdir()
    text = tmp_path / "texts" / "train.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    jobs = _sweep(
        tmp_path / "runs",
        *("-m", "lightning_moe", "train", "-m", "experiment=tiny_ep2_cpu"),
        *(f"data.paths=[{text}]", "data.val_fraction=0.5", "data.sequence_length=8"),
        *("data.batch_size=2", "model.d_model=16", "model.num_layers=2"),
        *("trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.limit_val_batches=1"),
        *(
            "optim.schedule=constant",
            "optim.warmup=0",
            "optim.decay=0",
            "trainer.num_sanity_val_steps=0",
        ),
        *("optim.lr=0.01,0.02", "+callbacks.told._target_=tests.e2e.hydra_script.Told"),
    )
    assert [job.name for job in jobs] == ["0", "1"]
    for job, rate in zip(jobs, (0.01, 0.02), strict=True):
        first, second = (json.loads((job / f"rank-{rank}.json").read_text()) for rank in range(2))
        assert first == second == {"lr": rate, "folder": str(job), "world": 2}
        assert (job / "checkpoints" / "last.ckpt").is_dir()
        assert (job / "metrics.csv").is_file()
        assert f"lr: {rate}" in (job / "config.yaml").read_text()
