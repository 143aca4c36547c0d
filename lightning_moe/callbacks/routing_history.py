"""The file `routing_history.npz` of a run folder: how every MoE layer routed, over the whole training."""

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

HISTORY_FILE: Final = "routing_history.npz"

MAX_ENTRIES: Final = 1000
"""More are merged, so that neither memory nor the file grows with the length of a run."""

# One row of every array.
Entry = Mapping[str, np.ndarray]


def append_entry(entries: list[Entry], entry: Entry) -> None:
    """Append to a history; beyond `MAX_ENTRIES` the two neighbours that cover the fewest steps become one."""
    entries.append(entry)
    if len(entries) > MAX_ENTRIES:
        num_steps = np.array([int(row["num_steps"]) for row in entries])
        pair = int(np.argmin(num_steps[:-1] + num_steps[1:]))
        entries[pair : pair + 2] = [_merged(entries[pair], entries[pair + 1])]


def _merged(first: Entry, second: Entry) -> Entry:
    merged = dict(second)
    merged["num_steps"] = first["num_steps"] + second["num_steps"]
    for name in second:
        kind, _, layer = name.rpartition("_")
        if kind in ("requested", "kept", "lost_tokens"):
            merged[name] = first[name] + second[name]
        elif kind == "rank_load":
            both = _rows([first, second], name)
            merged[name] = np.where((both < 0).any(axis=0), -1, both.sum(axis=0))
        elif kind in ("balance", "inner"):
            copies = [int(entry[f"requested_{layer}"].sum()) for entry in (first, second)]
            # One without copies has no loss.
            known = [
                pair for pair in ((first[name], copies[0]), (second[name], copies[1])) if pair[1]
            ]
            values, weights = zip(*known, strict=True) if known else ((np.nan,), (1,))
            merged[name] = np.asarray(np.average(values, weights=weights))
    return merged


def _rows(entries: Sequence[Entry], name: str) -> np.ndarray:
    """One array of all entries; where the number of ranks has changed, -1 stands for those that weren't there."""
    rows = [entry[name] for entry in entries]
    if name.startswith("rank_load_"):
        num_ranks = max(row.size for row in rows)
        rows = [np.pad(row, (0, num_ranks - row.size), constant_values=-1) for row in rows]
    return np.stack(rows)


def write_history(path: Path, entries: Sequence[Entry]) -> None:
    """Write all entries, one row each; whoever reads meanwhile finds the file as it was before, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        arrays = {name: _rows(entries, name) for name in entries[0]}
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read_history(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a routing history, S rows each.

    An entry adds up the optimizer steps since the one before, over all micro-batches and ranks. `steps` (S) is the last
    step of each entry (the Trainer's `global_step`, from 0), and `num_steps` (S) how many it adds up. From 1000 entries
    on, neighbours are merged. For MoE layer i of E experts, on R ranks:

    - `requested_{i}`, `kept_{i}` (S, E): token copies asked of each expert, and computed by it (int64);
    - `rank_load_{i}` (S, R): copies computed by each rank (int64); -1 in steps that a resumed run did without the rank;
    - `lost_tokens_{i}` (S): tokens none of whose copies was computed (int64);
    - `balance_{i}`, `inner_{i}` (S): the balance loss of all tokens of the entry together, and its distance from 1;
      where entries were merged, their mean by tokens; NaN where a score is;
    - `margin_{i}`, `entropy_{i}` (S): mean margin and entropy (nats) of the choice in the entry's last step, and in
      others whose routers traced anyway; NaN where they weren't taken.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the file is damaged.
    """
    try:
        # Opened here: numpy leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            history = dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged: {error}; delete it to do without the history"
        ) from error
    if "steps" not in history or len({len(rows) for rows in history.values()}) != 1:
        raise ValueError(
            f"{path} is damaged: its arrays don't have one row per step; delete it to do without the history"
        )
    return history


def entries_before(path: Path, step: int) -> list[Entry]:
    """The entries of a file that end before `step`; none if there is no file."""
    if not path.exists():
        return []
    history = read_history(path)
    rows = np.flatnonzero(history["steps"] < step)
    return [{name: np.asarray(rows_of[row]) for name, rows_of in history.items()} for row in rows]
