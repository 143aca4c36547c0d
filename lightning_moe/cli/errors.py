"""Errors as a user should see them: one message, at the end of what is on the screen."""

import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hydra
import omegaconf
from hydra.errors import HydraException
from hydra.errors import InstantiationException as TargetError
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from rich.console import Console

# Options of the same name elsewhere that a message lists at most.
_MAX_HINTS: Final = 3

_log: Final = logging.getLogger(__name__)

# A raise statement in these files is meant for users; anywhere else an error may be a fault of the program.
_SPEAK_TO_USERS: Final = tuple(
    str(folder) + os.sep
    for folder in (
        Path(__file__).parents[1],
        Path(hydra.__file__).parent,
        Path(omegaconf.__file__).parent,
    )
)
_OF_THE_MACHINE: Final = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ENAMETOOLONG,
)
_KINDS: Final = (
    ValueError,
    TypeError,
    RuntimeError,
    OSError,
    ImportError,
    HydraException,
    OmegaConfBaseException,
)


def show_error(error: Exception, *, full: bool = False, has_log: bool = True) -> None:
    """Print the message of `error`, after its traceback if it looks like a fault of the program.

    The traceback also goes to the log file of the run.

    Args:
        error: what ended the command.
        full: print the traceback in any case.
        has_log: whether there is such a file; until there is, Hydra logs to the screen.
    """
    if has_log:
        _log.info("the command failed", exc_info=error)
    root = _root_cause(error)
    # What the arguments of a target make it raise is about options, whoever raises it.
    if full or not (isinstance(error, TargetError) or _speaks_to_users(root)):
        traceback.print_exception(error)
        message = f"{type(root).__name__}: {describe(error)}"
    else:
        message = describe(error)
    sys.stdout.flush()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)


def describe(error: Exception) -> str:
    """What went wrong, in words."""
    root = _root_cause(error)
    if isinstance(root, ConfigAttributeError | ConfigKeyError) and root.full_key:
        return _unknown_key(root)
    if isinstance(error, TargetError) and root is not error:
        return f"{_key_of(error)}{root}"
    if isinstance(root, OmegaConfBaseException):
        # The other lines say what kind of node it was.
        return str(root).partition("\n")[0]
    # Where Hydra searched helps with Hydra, not with a misspelt option.
    return str(root).partition("\nConfig search path:")[0].strip() or type(root).__name__


def _root_cause(error: BaseException) -> BaseException:
    """Hydra and its targets wrap what went wrong; other chains are left alone."""
    wraps = isinstance(error, HydraException) and isinstance(error.__cause__, Exception)
    # "Could not find 'model/x'" has a cause too, but says itself what there is.
    return _root_cause(error.__cause__) if wraps and error.__cause__ is not None else error


def _speaks_to_users(error: BaseException) -> bool:
    if type(error).__name__ == "MisconfigurationException":
        return True
    # Whoever notices that a disk is full or a folder is protected, it is no fault of the program.
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    file = frames[-1][0].f_code.co_filename if frames else ""
    return isinstance(error, _KINDS) and file.startswith(_SPEAK_TO_USERS)


def _unknown_key(error: OmegaConfBaseException) -> str:
    section, _, name = str(error.full_key).rpartition(".")
    prefix = f"{section}." if section else ""
    if isinstance(error.parent_node, omegaconf.DictConfig) and error.parent_node == {}:
        return f"{section} is empty; add to it with a plus: +{error.full_key}=VALUE"
    elsewhere = _named_alike(error.parent_node, name)
    if elsewhere:
        return f"{prefix}{name} is not an option; did you mean {' or '.join(elsewhere)}?"
    known = list(_keys(error.parent_node))
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"{prefix}{name} is not an option; did you mean {prefix}{close[0]}?"
    return f"{prefix}{name} is not an option; choose from {', '.join(known) or 'nothing: this section is empty'}"


def _named_alike(node: object, name: str) -> list[str]:
    """Full names of options elsewhere that end in `name`: `max_steps` stands for `trainer.max_steps`."""
    if not isinstance(node, omegaconf.DictConfig):
        return []

    def search(section: object, path: str) -> Iterator[str]:
        for key in _keys(section):
            if key == name:
                yield f"{path}{key}"
            yield from search(_plain_child(section, key), f"{path}{key}.")

    found = [path for path in search(node._get_root(), "") if not path.startswith("hydra.")]
    # A name that many sections have is no hint.
    return found if len(found) <= _MAX_HINTS else []


def _plain_child(section: object, key: str) -> object:
    """A section by name, without resolving what only refers to another one."""
    return section._get_node(key) if isinstance(section, omegaconf.DictConfig) else None


def _keys(node: object) -> Iterator[str]:
    if isinstance(node, omegaconf.DictConfig) and not (
        node._is_none() or node._is_missing() or node._is_interpolation()
    ):
        yield from (str(key) for key in node)


def _key_of(error: TargetError) -> str:
    """`trainer: ` out of Hydra's "full_key: trainer"."""
    _, found, key = str(error).rpartition("full_key: ")
    return f"{key.strip()}: " if found else ""
