"""Runs `rank_script.py` as a user would, and says what it left behind."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    """What a run left behind."""

    code: int
    seconds: float  # from the fault on
    said: str
    steps: list[str]
    running: list[int]


def run_script(
    folder: Path, *words: str, launcher: tuple[str, ...] = (), **variables: str
) -> Ended:
    program = [*(launcher or (sys.executable,)), "-m", "tests.e2e.rank_script"]
    done = subprocess.run(
        [*program, str(folder), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    fault = folder / "fault"
    started = float(fault.read_text()) if fault.exists() else time.time()
    return Ended(
        code=done.returncode,
        seconds=time.time() - started,
        said=done.stderr,
        steps=[path.read_text().split()[-1] for path in sorted(folder.glob("steps-*"))],
        running=[
            pid
            for path in folder.glob("pid-*")
            if Path(f"/proc/{(pid := int(path.read_text()))}").exists()
        ],
    )
