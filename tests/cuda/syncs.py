"""Where a training script makes the host wait for a GPU, found without one.

    python -m tests.cuda.run -m tests.cuda.syncs SCRIPT.py [ARGUMENTS]

Runs the script until its Trainer's third optimizer step and prints the waits of the second one, each with the line of
the script, or of the module that it uses, and the innermost line. The Trainer must use a GPU (`accelerator="gpu"` or
"auto"); what it computes is right, and takes longer than on a CPU. Not found: waits inside of NCCL, and of what has no
CPU version.
"""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning as L

from tests.cuda.values import Values
from tests.cuda.waits import HostWaits


class Report(L.Callback):
    """Counts the waits from the end of the first optimizer step to that of the second, then stops the Trainer."""

    def __init__(self, waits: HostWaits) -> None:
        self.waits = waits
        self.micro_batches = 0
        self.lines: list[str] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The loop's own work for the batch before is done here."""
        if trainer.global_step == 1:
            if not self.micro_batches:
                self.waits.clear()
            self.micro_batches += 1
        elif trainer.global_step == 2 and not self.lines:
            total = self.waits.total()
            self.lines = [
                f"{total} waits of the host in one optimizer step of {self.micro_batches} micro-batches"
            ]
            self.lines += [f"{n:6}  {wait}" for wait, n in self.waits.found.most_common()]
            trainer.should_stop = True


def count(script: str, arguments: list[str]) -> list[str]:
    """Run the script and give the lines of the report.

    Raises:
        RuntimeError: if no Trainer made three optimizer steps on a GPU.
    """
    waits = HostWaits()
    report = Report(waits)
    fit = L.Trainer.fit

    def observed(trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.callbacks.append(report)
        fit(trainer, *args, **kwargs)

    L.Trainer.fit = observed
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        with Values(), waits:
            runpy.run_path(script, run_name="__main__")
    finally:
        L.Trainer.fit = fit
    if not report.lines:
        raise RuntimeError(f"{script} made no three optimizer steps with a Trainer")
    return report.lines


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for line in count(options.script, options.arguments):
        print(line)


if __name__ == "__main__":
    main()
