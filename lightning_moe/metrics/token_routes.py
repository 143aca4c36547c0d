"""The file of `RoutingTrace`: routes of some steps on one rank, as compressed numpy arrays."""

import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_moe.files import atomic_write
from lightning_moe.ops.records import TokenRoutes

_FIELDS = ("ids", "weights", "margins", "valid")


class RouteKey(NamedTuple):
    """Where routes were taken: optimizer step, micro-batch within it, MoE layer, all counted from 0."""

    step: int
    micro_batch: int
    layer: int

    def __str__(self) -> str:
        return f"step {self.step}, micro-batch {self.micro_batch}, layer {self.layer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Routes of all tokens of one micro-batch in one layer; see `ops.records.TokenRoutes`.

    Attributes:
        ids: (T, K) experts, best first, in the smallest unsigned integer that holds them.
        weights: (T, K).
        margins: (T).
        valid: (T).
    """

    ids: np.ndarray
    weights: np.ndarray
    margins: np.ndarray
    valid: np.ndarray

    @classmethod
    def of(cls, tokens: TokenRoutes) -> "Routes":
        """A copy in host memory."""
        ids = tokens.ids_TK.cpu().numpy()
        smallest = np.min_scalar_type(int(ids.max(initial=0)))
        return cls(
            ids=ids.astype(smallest),
            weights=tokens.weights_TK.cpu().numpy(),
            margins=tokens.margin_T.cpu().numpy(),
            valid=tokens.valid_T.cpu().numpy(),
        )


def rank_path(path: Path, rank: int) -> Path:
    """`routes.npz` of rank 3 is `routes-rank3.npz`."""
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def later_ranks(path: Path, num_ranks: int) -> list[Path]:
    """The files beside that of one rank, `path`, that are of ranks from `num_ranks` on."""
    stem = path.stem.rpartition("-rank")[0]
    pattern = re.compile(rf"{re.escape(stem)}-rank(\d+){re.escape(path.suffix)}")
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    return [
        file
        for file in files
        if (match := pattern.fullmatch(file.name)) and int(match.group(1)) >= num_ranks
    ]


def write_routes(path: Path, records: Mapping[RouteKey, Routes]) -> None:
    """Write all of them, or leave what was there."""
    arrays = {
        f"{field}/{key.step}/{key.micro_batch}/{key.layer}": getattr(routes, field)
        for key, routes in records.items()
        for field in _FIELDS
    }
    with atomic_write(path) as file:
        np.savez_compressed(file, **arrays)


def read_routes(path: Path) -> dict[RouteKey, Routes]:
    """The records of a file, in the order of steps, micro-batches and layers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged or something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a file that RoutingTrace wrote")
    found: dict[RouteKey, dict[str, np.ndarray]] = {}
    try:
        # Opened here: numpy leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file) as arrays:
            for name in arrays:
                field, *numbers = name.split("/")
                found.setdefault(RouteKey(*map(int, numbers)), {})[field] = arrays[name]
        return {key: Routes(**found[key]) for key in sorted(found)}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} can't be read as routes of RoutingTrace; was it written to its end? ({error})"
        ) from error
