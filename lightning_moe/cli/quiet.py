"""What Lightning says in normal use and nobody needs to read, and why."""

import logging
import warnings
from typing import Final

_HARMLESS: Final = (
    # The run folder exists before the logger: Hydra writes its options there first.
    "Experiment logs directory .* exists and is not empty",
    # A resumed run may go on in its own folder.
    "Checkpoint directory .* exists and is not empty",
    # One row costs microseconds (a slice of an array); data.num_workers is there for slower storage.
    ".*does not have many workers",
    # The CPU was asked for: trainer.accelerator=cpu.
    "GPU available but not used",
    # Lightning 2.6 asks for torch's old LeafSpec on every batch; can go with the release that stops.
    ".*isinstance\\(treespec, LeafSpec\\)",
    # Saved at a validation in the middle of an epoch; the data loader keeps its position (data.sampling).
    "You're resuming from a checkpoint that ended before the epoch ended",
)


def quieten() -> None:
    """Keep harmless warnings off the screen; Lightning's notes go to the log file of the run only."""
    # Lightning prints on its own as well as through the root logger, which has the levels of conf/hydra/job_logging.
    logging.getLogger("lightning").handlers.clear()
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
