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
        timeout=300,
        check=False,
    )
    fault = folder / "fault"
    started = float(fault.read_text()) if fault.exists() else time.time()
    return Ended(
        code=done.returncode,
        seconds=time.time() - started,
        said=done.stderr,
        steps=[path.read_text().split()[-1] for path in sorted(folder.glob("steps-*"))],
        running=_still_running([int(path.read_text()) for path in folder.glob("pid-*")]),
    )


def _still_running(pids: list[int]) -> list[int]:
    """Those that are there for ten seconds more: what was killed may end a moment after its parent."""
    deadline = time.monotonic() + 10
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if _is_running(pid)]
        time.sleep(0.05 if pids else 0)
    return pids


def _is_running(pid: int) -> bool:
    try:
        # The state comes after the name, in brackets; Z has ended and waits to be asked how.
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return False
