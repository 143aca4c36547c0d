"""How the threads of CPU kernels wait for each other."""

import os
import sys


def wait_without_spinning() -> bool:
    """Let waiting threads sleep; whether that is still possible, which it is before torch is imported.

    By default they spin for a while, and where another program wants the same cores they take them from the very
    thread they wait for: a step of the tiny model on 2 busy cores took 2 to 5 times as long. A value of
    `OMP_WAIT_POLICY` that is set already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return "torch" not in sys.modules
