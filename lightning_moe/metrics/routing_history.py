"""The routing history of a run: how every MoE layer routed, over the whole training, in memory and on disk."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from lightning_moe.files import atomic_write

HISTORY_FILE: Final = "routing_history.npz"

MAX_ENTRIES: Final = 1000
"""More are merged, so that neither memory nor the file grows with the length of a run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerRouting:
    """One MoE layer of E experts over S entries of a history, summed over all micro-batches and R ranks.

    Attributes:
        requested_SE, kept_SE: token copies asked of each expert, and computed by it (int64).
        rank_load_SR: copies computed by each rank (int64); -1 in entries of a run that did not have the rank.
        lost_tokens_S: tokens none of whose copies was computed (int64).
        balance_S, inner_S: the balance loss of all tokens of the entry together, without its weight, and its distance
            from 1; of merged entries their mean by copies; NaN where nothing was routed or a score is NaN.
        margin_S, entropy_S: mean margin and entropy (nats) of the choice in the entry's last step, and in others whose
            routers traced anyway; NaN where they were not taken.
    """

    requested_SE: np.ndarray
    kept_SE: np.ndarray
    rank_load_SR: np.ndarray
    lost_tokens_S: np.ndarray
    balance_S: np.ndarray
    inner_S: np.ndarray
    margin_S: np.ndarray
    entropy_S: np.ndarray

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(self.requested_SE.shape[1])

    def rows(self, of: slice) -> "LayerRouting":
        """The entries `of`."""
        return LayerRouting(**{name: getattr(self, name)[of] for name in _FIELDS})

    def merged(self) -> "LayerRouting":
        """All entries as one."""
        copies_S = self.requested_SE.sum(axis=1)
        # An entry without copies has no loss.
        routed_S = copies_S > 0

        def mean(values_S: np.ndarray) -> np.ndarray:
            if not routed_S.any():
                return np.array([np.nan])
            return np.array([np.average(values_S[routed_S], weights=copies_S[routed_S])])

        absent_R = (self.rank_load_SR < 0).any(axis=0)
        return LayerRouting(
            requested_SE=self.requested_SE.sum(axis=0, keepdims=True),
            kept_SE=self.kept_SE.sum(axis=0, keepdims=True),
            rank_load_SR=np.where(absent_R, -1, self.rank_load_SR.sum(axis=0))[None],
            lost_tokens_S=self.lost_tokens_S.sum(keepdims=True),
            balance_S=mean(self.balance_S),
            inner_S=mean(self.inner_S),
            margin_S=self.margin_S[-1:],
            entropy_S=self.entropy_S[-1:],
        )


_FIELDS: Final = tuple(field.name for field in fields(LayerRouting))
# The file leaves the letters of the shape out.
_IN_FILE: Final = {name: name.rpartition("_")[0] for name in _FIELDS}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutingHistory:
    """S entries; each adds up the optimizer steps since the one before.

    In a file the arrays are called `steps`, `num_steps` and, for MoE layer i, `requested_i kept_i rank_load_i
    lost_tokens_i balance_i inner_i margin_i entropy_i`; see `LayerRouting`.

    Attributes:
        steps_S: the last step of each entry (the Trainer's `global_step`, from 0).
        num_steps_S: how many steps each entry adds up.
        layers: the MoE layers, in the order of the model.
    """

    steps_S: np.ndarray
    num_steps_S: np.ndarray
    layers: tuple[LayerRouting, ...]

    @classmethod
    def joined(cls, parts: Sequence["RoutingHistory"]) -> "RoutingHistory":
        """The entries of all `parts` of one model, one after the other."""
        if not parts:
            return NO_HISTORY
        return cls(
            steps_S=np.concatenate([part.steps_S for part in parts]),
            num_steps_S=np.concatenate([part.num_steps_S for part in parts]),
            layers=tuple(
                _joined(rows) for rows in zip(*(part.layers for part in parts), strict=True)
            ),
        )

    def __len__(self) -> int:
        return len(self.steps_S)

    def rows(self, of: slice) -> "RoutingHistory":
        """The entries `of`."""
        return RoutingHistory(
            steps_S=self.steps_S[of],
            num_steps_S=self.num_steps_S[of],
            layers=tuple(layer.rows(of) for layer in self.layers),
        )

    def entries(self) -> list["RoutingHistory"]:
        """One history per entry."""
        return [self.rows(slice(row, row + 1)) for row in range(len(self))]

    def before(self, step: int) -> "RoutingHistory":
        """The entries that end before `step`."""
        return self.rows(slice(0, int(np.searchsorted(self.steps_S, step))))

    def merged(self) -> "RoutingHistory":
        """All entries as one."""
        return RoutingHistory(
            steps_S=self.steps_S[-1:],
            num_steps_S=self.num_steps_S.sum(keepdims=True),
            layers=tuple(layer.merged() for layer in self.layers),
        )

    # ---- on disk ---------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file, by name."""
        by_layer = {
            f"{_IN_FILE[name]}_{number}": getattr(layer, name)
            for number, layer in enumerate(self.layers)
            for name in _FIELDS
        }
        return {"steps": self.steps_S, "num_steps": self.num_steps_S} | by_layer

    def write(self, path: Path) -> None:
        """Write the file; a reader finds it as it was before, or the new one."""
        with atomic_write(path) as file:
            np.savez(file, allow_pickle=False, **self.arrays())

    @classmethod
    def read(cls, path: Path) -> "RoutingHistory":
        """Read a file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is damaged.
        """
        try:
            # Opened here: numpy leaves the file of a damaged archive open.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = dict(arrays)
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise _damaged(path, str(error)) from error
        layers: list[LayerRouting] = []
        try:
            while f"{_IN_FILE[_FIELDS[0]]}_{len(layers)}" in found:
                layers.append(_layer(found, len(layers)))
            history = cls(
                steps_S=found["steps"], num_steps_S=found["num_steps"], layers=tuple(layers)
            )
        except KeyError as error:
            raise _damaged(path, f"it has no array {error}") from error
        if len({len(rows) for rows in found.values()}) != 1:
            raise _damaged(path, "its arrays don't have one row per entry")
        return history


def read_history(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a history's file by name, S rows each; see `RoutingHistory`, which raises the same errors."""
    return RoutingHistory.read(path).arrays()


NO_HISTORY: Final = RoutingHistory(
    steps_S=np.zeros(0, dtype=np.int64), num_steps_S=np.zeros(0, dtype=np.int64), layers=()
)
"""Of a run that recorded none."""


def append_entry(entries: list[RoutingHistory], entry: RoutingHistory) -> None:
    """Append to a list of single entries; beyond `MAX_ENTRIES` the two neighbours with the fewest steps become one."""
    entries.append(entry)
    if len(entries) > MAX_ENTRIES:
        num_steps = np.concatenate([one.num_steps_S for one in entries])
        pair = int(np.argmin(num_steps[:-1] + num_steps[1:]))
        entries[pair : pair + 2] = [RoutingHistory.joined(entries[pair : pair + 2]).merged()]


def _joined(parts: Sequence[LayerRouting]) -> LayerRouting:
    num_ranks = max(part.rank_load_SR.shape[1] for part in parts)
    padded = [
        replace(
            part,
            rank_load_SR=np.pad(
                part.rank_load_SR,
                ((0, 0), (0, num_ranks - part.rank_load_SR.shape[1])),
                constant_values=-1,
            ),
        )
        for part in parts
    ]
    return LayerRouting(
        **{name: np.concatenate([getattr(part, name) for part in padded]) for name in _FIELDS}
    )


def _layer(arrays: Mapping[str, np.ndarray], number: int) -> LayerRouting:
    return LayerRouting(**{name: arrays[f"{_IN_FILE[name]}_{number}"] for name in _FIELDS})


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged: {reason}; delete it to do without the history")
