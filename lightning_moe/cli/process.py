"""How the process of a run behaves: which memory it keeps, how its threads wait, and which warnings it shows."""

import ctypes
import logging
import os
import sys
import warnings
from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells count it."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_KEPT_BYTES: Final = 1 << 30

# What Lightning warns of in normal use, and why it does not matter here.
_HARMLESS: Final = (
    # The run folder exists before the logger: Hydra writes its options there first. It belongs to this run (cli.runs).
    "Experiment logs directory .* exists and is not empty",
    # A resumed run may go on in its own folder.
    "Checkpoint directory .* exists and is not empty",
    # One row costs microseconds (a slice of an array); data.num_workers is there for slower storage.
    ".*does not have many workers",
    # The CPU was asked for: trainer.accelerator=cpu.
    "GPU available but not used",
    # Lightning 2.6 asks for torch's old LeafSpec on every batch; can go with the release that stops.
    ".*isinstance\\(treespec, LeafSpec\\)",
    # A resumed run keeps the best checkpoints of its own folder only.
    "The dirpath has changed from .* to",
    # Saved at a validation in the middle of an epoch; the data loader keeps its position (data.sampling).
    "You're resuming from a checkpoint that ended before the epoch ended",
)


def keep_freed_memory() -> bool:
    """Let this process reuse freed buffers of up to 1 GiB; whether that is possible here.

    By default glibc maps every large buffer anew and unmaps it when it is freed, so each step pays for clearing all
    its pages: an MoE layer on the CPU ran 1.4 to 1.8 times as fast without that, with twice the memory. Does nothing
    without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # An older glibc refuses a threshold above 32 MiB; no mapping at all is what remains.
        maps_less = mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_MAX, 0)
        return bool(maps_less and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    # macOS and musl have no mallopt, Windows no library without a name.
    except (AttributeError, OSError, TypeError):
        return False


def wait_without_spinning() -> bool:
    """Let waiting threads sleep; whether that is still possible, which it is before torch is imported.

    By default they spin for a while, and where another program wants the same cores they take them from the very
    thread they wait for: a step of the tiny model on 2 busy cores took 2 to 5 times as long. A value of
    `OMP_WAIT_POLICY` that is set already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return "torch" not in sys.modules


def quieten() -> None:
    """Keep harmless warnings off the screen; Lightning's notes go to the log file of the run only."""
    # Lightning prints on its own as well as through the root logger, which has the levels of conf/hydra/job_logging.
    logging.getLogger("lightning").handlers.clear()
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)


def is_further_rank() -> bool:
    """Whether a launcher has started this process as another rank than the first."""
    # As Lightning has it; the first that is set counts.
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    ranks = [os.environ[name] for name in names if os.environ.get(name)]
    return bool(ranks) and ranks[0] != "0"
