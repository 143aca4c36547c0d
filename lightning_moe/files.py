"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` once it is complete and on the disk; after an error it is removed.

    A reader finds what was there before, or all of the new file. Missing folders are made.

    Raises:
        OSError: if it can't be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Ranks and workers may write the same file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
