"""Children of a run that is over aren't watched any more."""

import subprocess
import sys
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_moe.strategy.launchers import ScriptLauncher


class _Observer(_ChildProcessObserver):
    """Notes what it would have done."""

    killed = False

    def _terminate_all(self) -> None:
        self.killed = True


def _observed(*, release: bool) -> tuple[bool, bool, list[Any], subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(143)"])
    child.wait(30)
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    launcher.procs = [child]
    observer = _Observer(main_pid=0, child_processes=launcher.procs)
    released = launcher.release_children() if release else []
    return observer._run(), observer.killed, released, child


def test_a_childs_exit_code_ends_the_run_only_while_it_is_watched() -> None:
    finished, killed, _, _ = _observed(release=False)
    assert (finished, killed) == (True, True)
    finished, killed, released, child = _observed(release=True)
    assert (finished, killed) == (True, False)
    assert released == [child]
