"""One rank's problem becomes an error on all ranks, or on none."""

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Final, TypeVar

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from lightning_moe.parallel.collectives import gather_objects

T = TypeVar("T")

# What reading a damaged checkpoint raises, `.safetensors` included. torch's CheckpointException is no Exception.
UNREADABLE: Final = (
    EOFError,
    KeyError,
    RuntimeError,
    UnpicklingError,
    CheckpointException,
    SafetensorError,
)


def jointly(action: Callable[[], T], path: str) -> T:
    """What `action` gives, once it has worked on all ranks.

    Raises:
        FileNotFoundError, ValueError: this rank's own problem.
        RuntimeError: another rank's.
    """
    problem: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError) as error:
        problem = error
    except UNREADABLE as error:
        problem = ValueError(f"{path} is not a readable checkpoint: {error}")
    message = None if problem is None else f"{type(problem).__name__}: {problem}"
    others = gather_objects(message)
    if problem is not None:
        raise problem
    _raise_first(others, path)
    return result


def agree(problem: str | None, path: str) -> None:
    """Raise on all ranks what any of them could not write; None for no problem."""
    _raise_first(gather_objects(problem), f"no checkpoint at {path}")


def _raise_first(problems: list[str | None], what: str) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise RuntimeError(f"{what}: rank {rank}: {problem}")
