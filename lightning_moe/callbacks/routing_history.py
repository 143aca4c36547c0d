"""The file `routing_history.npz` of a run folder: how every MoE layer routed, over the whole training."""

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

HISTORY_FILE: Final = "routing_history.npz"

# One row of every array.
Entry = Mapping[str, np.ndarray]


def write_history(path: Path, entries: Sequence[Entry]) -> None:
    """Write all entries, one row each; whoever reads meanwhile finds the file as it was before, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        arrays = {name: np.stack([entry[name] for entry in entries]) for name in entries[0]}
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read_history(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a routing history, S rows each.

    An entry adds up the optimizer steps since the one before, over all micro-batches and ranks. `steps` (S) is the last
    step of each entry, counted from 0, and `num_steps` (S) how many it adds up. For MoE layer i of E experts, on R
    ranks:

    - `requested_{i}`, `kept_{i}` (S, E): token copies asked of each expert, and computed by it (int64);
    - `rank_load_{i}` (S, R): copies computed by each rank (int64);
    - `lost_tokens_{i}` (S): tokens none of whose copies was computed (int64);
    - `balance_{i}`, `inner_{i}` (S): the balance loss of all tokens of the entry together, and its distance from 1;
    - `margin_{i}`, `entropy_{i}` (S): mean margin and entropy (nats) of the choice in the entry's last step, NaN where
      they weren't taken.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the file is damaged.
    """
    try:
        # Opened here: numpy leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            history = dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if "steps" not in history or len({len(rows) for rows in history.values()}) != 1:
        raise ValueError(f"{path} is damaged: its arrays don't have one row per step")
    return history


def entries_before(path: Path, step: int) -> list[Entry]:
    """The entries of a file that end before `step`; none if there is no file."""
    if not path.exists():
        return []
    history = read_history(path)
    rows = np.flatnonzero(history["steps"] < step)
    return [{name: np.asarray(rows_of[row]) for name, rows_of in history.items()} for row in rows]
