"""The commands of docs/findings.md run as shown, with settings that make them short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "findings.md"
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
SHORT = (
    "data.paths=[corpus.txt]",
    "data.val_fraction=0.5",
    "data.sequence_length=16",
    "data.batch_size=2",
    "model.d_model=32",
    "model.num_layers=2",
    "optim.schedule=constant",
    "optim.warmup=0",
    "optim.decay=0",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    # Fewer jobs of each sweep.
    "model.moe.router.lb_loss_scope=sequence",
    "model.moe.router.bias_gamma=null",
    "seed=0",
)


def test_the_page_shows_commands_and_examples_that_exist() -> None:
    scripts = re.findall(r"python (examples/\S+\.py)", PAGE.read_text())
    assert scripts
    # Every example is run by test_examples.py.
    assert all((ROOT / script).is_file() for script in scripts)
    assert sum("lightning-moe train" in block for block in BLOCKS) == 3


@pytest.mark.parametrize("block", [block for block in BLOCKS if "lightning-moe" in block])
def test_the_commands_of_a_block_run_and_report_every_job(block: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(PAGE.read_text())
    command = tmp_path / "bin" / "lightning-moe"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\n[ "$1" = train ] && set -- "$@" {" ".join(SHORT)}\n'
        f'exec "{sys.executable}" -m lightning_moe "$@"\n'
    )
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*/sweep.csv")
    _, *jobs = table.read_text().splitlines()
    assert len(jobs) > 1
    # No job is without its steps.
    assert all(",2," in job for job in jobs), jobs
    assert (table.parent / "report.html").is_file()
