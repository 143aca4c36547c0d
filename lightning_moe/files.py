"""Files that are whole or not there."""

import os
import secrets
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
    # Ranks may write the same file; and nobody can have put a symlink where the name is random.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
