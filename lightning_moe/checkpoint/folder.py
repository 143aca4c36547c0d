"""Checkpoint folders that don't know how many ranks wrote them.

A folder holds one `torch.distributed.checkpoint` of all tensors, each under its global name with its global shape,
and `meta.pt` with everything else as plain types. Trees of tensors: `state_dict` and further ones shaped like the
module (averaged weights, for example), and `optimizer_<i>` with flat moments and masters by parameter name.
"""

import io
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any, Final

import fsspec
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_moe.checkpoint.joint_errors import agree
from lightning_moe.checkpoint.metadata import METADATA, folder_reader
from lightning_moe.checkpoint.outline import META, Place
from lightning_moe.checkpoint.parts import Part
from lightning_moe.checkpoint.trees import Tree

# The names of all files that a save leaves, also one that was killed.
_WRITTEN: Final = re.compile(rf"__\d+_\d+\.distcp|{re.escape(META)}|{re.escape(METADATA)}(\.tmp)?")
_UNWRITABLE: Final = (OSError, RuntimeError, TypeError, AttributeError, PicklingError)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> object:
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Part],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The default replaces whatever is no torch tensor by None.
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


# ---- writing -------------------------------------------------------------------------------------------------


def save_folder(path: str, trees: Mapping[str, Tree], meta: dict[str, Any], *, rank: int) -> None:
    """Write a folder aside, then put it in the place of an older one; a failure leaves that as it was.

    All ranks call it.

    Args:
        path: the folder, local or any fsspec URL.
        trees: with `Part` leaves.
        meta: plain types; the first rank's are written.
        rank: this one.

    Raises:
        RuntimeError: on all ranks, if one of them can't write, or if something else than a checkpoint is in the way.
    """
    aside = f"{path}.partial"
    fs, _ = url_to_fs(path)

    def clear() -> None:
        for place in (path, f"{path}.previous", aside):
            _refuse_foreign(fs, place)
        _remove(fs, aside)
        fs.makedirs(aside, exist_ok=True)

    def finish() -> None:
        _write_meta(fs, f"{aside}/{META}", meta)
        _publish(fs, aside, path)

    agree(_problem_of(clear) if rank == 0 else None, path)
    try:
        save_tensors(dict(trees), checkpoint_id=aside, planner=_SavePlanner())
    except CheckpointException as error:  # on all ranks
        if rank == 0:
            _problem_of(lambda: _remove(fs, aside))
        raise RuntimeError(f"no checkpoint at {path}: {_first_failure(error)}") from None
    agree(_problem_of(finish) if rank == 0 else None, path)


def _refuse_foreign(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Check that `path` holds nothing, or nothing but what a save writes: it will be removed.

    Raises:
        FileExistsError: naming what it is.
    """
    fs.invalidate_cache()
    advice = "choose another path, or move it away"
    if fs.isdir(path):
        names = (entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False))
        if foreign := sorted(name for name in names if not _WRITTEN.fullmatch(name)):
            raise FileExistsError(f"{path} holds {foreign[0]}, which is of no checkpoint; {advice}")
    elif fs.exists(path):
        with fs.open(path, "rb") as file:
            if not zipfile.is_zipfile(file):  # as torch.save writes
                raise FileExistsError(f"{path} is a file, and no checkpoint; {advice}")


def _problem_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except _UNWRITABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first_failure(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank} could not write, is the disk full? ({type(failure).__name__}: {failure})"


def _write_meta(fs: fsspec.AbstractFileSystem, path: str, meta: dict[str, Any]) -> None:
    content = io.BytesIO()
    torch.save(meta, content)
    content.seek(0)
    try:
        torch.load(content, weights_only=True)
    except UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), error)
        raise TypeError(
            "the hyper-parameters or a callback's state hold something that is no plain type, so that no checkpoint "
            f"could be loaded again; leave it out of them ({reason})"
        ) from error
    with fs.open(path, "wb") as file:
        file.write(content.getbuffer())


def _publish(fs: fsspec.AbstractFileSystem, aside: str, path: str) -> None:
    previous = f"{path}.previous"
    _remove(fs, previous)
    if _is_link(fs, path):
        _remove(fs, path)
    if fs.exists(path):
        fs.mv(path, previous, recursive=True)
    fs.mv(aside, path, recursive=True)
    _remove(fs, previous)


def _remove(fs: fsspec.AbstractFileSystem, path: str) -> None:
    if _is_link(fs, path):
        Path(fs._strip_protocol(path)).unlink()
    elif fs.exists(path):
        fs.rm(path, recursive=True)


def _is_link(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    return isinstance(fs, LocalFileSystem) and Path(fs._strip_protocol(path)).is_symlink()


# ---- reading -------------------------------------------------------------------------------------------------


def existing_path(path: str) -> str:
    """The checkpoint to read for `path`: itself, or the one that a killed save had just moved out of the way.

    Raises:
        FileNotFoundError: if there is neither.
    """
    fs, _ = url_to_fs(path)
    for candidate in (path, f"{path}.previous"):
        if fs.exists(candidate):
            return candidate
    raise FileNotFoundError(f"checkpoint {path} does not exist")


def is_folder(path: str) -> bool:
    """Whether `path` is a folder written by `save_folder`.

    Raises:
        ValueError: if it is a folder, but not a whole one.
    """
    fs, _ = url_to_fs(path)
    if not fs.isdir(path):
        return False
    if missing := [name for name in (META, METADATA) if not fs.exists(f"{path}/{name}")]:
        raise ValueError(f"{path} is not a complete checkpoint folder: it has no {missing[0]}")
    return True


def load_parts(path: str, parts: Mapping[Place, Part], *, alone: bool = False) -> Tree:
    """Fill the tensors of `parts`, each named by its place in the trees, with this rank's values.

    Args:
        path: the folder.
        parts: what to read.
        alone: no other rank takes part.

    Returns:
        The tensors as nested dicts.
    """
    if parts or not alone:
        by_name = {".".join(place): part for place, part in parts.items()}
        with warnings.catch_warnings():
            # torch warns that it reads alone, also where it is told to.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_tensors(
                by_name,
                storage_reader=folder_reader(path),
                planner=_LoadPlanner(),
                no_dist=alone,
            )
    tree: Tree = {}
    for place, part in parts.items():
        branch = tree
        for key in place[:-1]:
            branch = branch.setdefault(key, {})
        branch[place[-1]] = part.tensor
    return tree
