"""Checkpoint folders that don't know how many ranks wrote them.

A folder holds one `torch.distributed.checkpoint` of all tensors, each under its global name with its global shape,
and `meta.pt` with everything else as plain types. Trees of tensors: `state_dict` and further ones shaped like the
module (averaged weights, for example), and `optimizer_<i>` with flat moments and masters by parameter name.
Tensors of one rank are given and taken as local tensors; `ParamLayout` says where they belong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import fsspec
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_moe.parallel.layout import ParamLayout

META: Final = "meta.pt"
Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A local tensor as a block of a global one; speaks torch's protocol for objects in a checkpoint.

    Attributes:
        tensor: contiguous local values; loading overwrites them.
        size: global shape.
        offsets: where the block starts.
    """

    tensor: Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())

    def __create_write_items__(self, fqn: str, part: object) -> list[WriteItem]:
        """What to write: torch drops blocks that another rank writes as well."""
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=torch.Size(self.size),
        )
        index = MetadataIndex(fqn, torch.Size(self.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read."""
        return [self._chunk()]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - torch's signature
        return self.state_dict[index.fqn].tensor


class _LoadPlanner(DefaultLoadPlanner):
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


class FolderLayout:
    """Maps local tensors to blocks of global ones and back.

    Args:
        layout: the parameters; experts' names decide, whoever owns the tensors.
    """

    def __init__(self, layout: ParamLayout) -> None:
        self.layout = layout

    def weight(self, name: str, tensor: Tensor) -> Part:
        """A tensor shaped like a local parameter or buffer."""
        offsets = [0] * tensor.dim()
        size = list(tensor.shape)
        spec = self.layout.specs.get(name)
        if spec is not None and spec.num_shards > 1:
            offsets[0] = spec.shard_index * size[0]
            size[0] *= spec.num_shards
        return Part(tensor=tensor.detach().contiguous(), size=tuple(size), offsets=tuple(offsets))

    def moment(self, name: str, tensor: Tensor) -> Part:
        """A tensor of the optimizer, shaped like this rank's part of a parameter; or a scalar."""
        flat = tensor.detach().reshape(-1) if tensor.dim() else tensor.detach()
        if not tensor.dim():
            return Part(tensor=flat, size=(), offsets=())
        spec = self.layout.specs[name]
        if flat.numel() != spec.chunk:
            raise ValueError(
                f"the optimizer keeps a tensor of {flat.numel()} elements for {name}, whose part here has "
                f"{spec.chunk}; only elementwise optimizers can be saved with experts on several ranks"
            )
        offset = spec.shard_index * spec.numel + spec.chunk_start
        return Part(tensor=flat, size=(spec.global_numel,), offsets=(offset,))

    def local_weight(
        self, name: str, saved: TensorStorageMetadata, num_experts: int | None
    ) -> Part:
        """An empty tensor for what this rank needs of a saved one; `num_experts` if dimension 0 counts experts."""
        size, offsets = list(saved.size), [0] * len(saved.size)
        mesh = self.layout.mesh
        if num_experts is not None:
            experts = mesh.shape.experts_of(mesh.rank, num_experts)
            size[0], offsets[0] = len(experts), experts.start
        return Part(tensor=_empty(size, saved), size=tuple(saved.size), offsets=tuple(offsets))

    def local_moment(self, name: str, saved: TensorStorageMetadata) -> Part | None:
        """The same for a tensor of the optimizer; None for a parameter that this model doesn't have."""
        if not saved.size:
            return Part(tensor=_empty([], saved), size=(), offsets=())
        spec = self.layout.specs.get(name)
        if spec is None or saved.size[0] != spec.global_numel:
            return None
        offset = spec.shard_index * spec.numel + spec.chunk_start
        return Part(tensor=_empty([spec.chunk], saved), size=tuple(saved.size), offsets=(offset,))

    def expert_counts(self) -> dict[str, int]:
        """Number of experts of every parameter whose dimension 0 counts them."""
        return {
            name: spec.global_shape[0]
            for name, spec in self.layout.specs.items()
            if spec.kind == "expert"
        }


def _empty(size: list[int], saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(size, dtype=saved.properties.dtype)


def save_folder(path: str, trees: Mapping[str, Tree], meta: dict[str, Any], world: "World") -> None:
    """Write a folder aside, then put it in the place of an older one; a failure leaves that as it was.

    All ranks call it.

    Args:
        path: the folder, local or any fsspec URL.
        trees: nested dicts with `Part` leaves.
        meta: plain types; the first rank's are written.
        world: who the ranks are.
    """
    aside = f"{path}.partial"
    fs = get_filesystem(path)
    if world.is_first:
        _remove(fs, aside)
        fs.makedirs(aside, exist_ok=True)
    world.barrier()
    save_tensors(dict(trees), checkpoint_id=aside, planner=_SavePlanner())
    if world.is_first:
        with fs.open(f"{aside}/{META}", "wb") as file:
            torch.save(meta, file)
        _publish(fs, aside, path)
    world.barrier()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What saving needs to know of the ranks."""

    is_first: bool
    barrier: Callable[[], None]


def _publish(fs: fsspec.AbstractFileSystem, aside: str, path: str) -> None:
    previous = f"{path}.previous"
    _remove(fs, previous)
    if fs.exists(path):
        fs.mv(path, previous, recursive=True)
    fs.mv(aside, path, recursive=True)
    _remove(fs, previous)


def _remove(fs: fsspec.AbstractFileSystem, path: str) -> None:
    if fs.exists(path):
        fs.rm(path, recursive=True)


def existing_path(path: str) -> str:
    """The checkpoint to read for `path`: itself, or the one that a killed save had just moved out of the way.

    Raises:
        FileNotFoundError: if there is neither.
    """
    fs = get_filesystem(path)
    for candidate in (path, f"{path}.previous"):
        if fs.exists(candidate):
            return candidate
    raise FileNotFoundError(f"ckpt_path={path} does not exist")


def is_folder(path: str) -> bool:
    """Whether `path` is a folder written by `save_folder`.

    Raises:
        ValueError: if it is a folder, but not a whole one.
    """
    fs = get_filesystem(path)
    if not fs.isdir(path):
        return False
    if missing := [name for name in (META, ".metadata") if not fs.exists(f"{path}/{name}")]:
        raise ValueError(
            f"ckpt_path={path} is not a complete checkpoint folder: it has no {missing[0]}"
        )
    return True


def read_meta(path: str) -> dict[str, Any]:
    """`meta.pt` of a folder; it can't run code."""
    with get_filesystem(path).open(f"{path}/{META}", "rb") as file:
        meta: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return meta


def read_sizes(path: str) -> dict[tuple[str, ...], TensorStorageMetadata]:
    """Global shape and type of every tensor of a folder, by its place in the trees."""
    # Relies on the map from flat names to places that DefaultSavePlanner keeps.
    metadata: Metadata = (
        FileSystemReader(path).read_metadata() if "://" not in path else _remote(path)
    )
    return {
        tuple(str(key) for key in metadata.planner_data[fqn]): saved
        for fqn, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def _remote(path: str) -> Metadata:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # noqa: PLC0415 - needs fsspec's extras

    return FsspecReader(path).read_metadata()


def load_parts(path: str, parts: Mapping[tuple[str, ...], Part]) -> None:
    """Fill the tensors of `parts`, each named by its place in the trees, with this rank's values."""
    if parts:
        load_tensors(_nested(parts), checkpoint_id=path, planner=_LoadPlanner())


def _nested(parts: Mapping[tuple[str, ...], Part]) -> Tree:
    tree: Tree = {}
    for place, part in parts.items():
        branch = tree
        for key in place[:-1]:
            branch = branch.setdefault(key, {})
        branch[place[-1]] = part
    return tree


def local_tree(
    path: str, folder: FolderLayout, tree: str, experts: Mapping[str, int]
) -> dict[str, Tensor]:
    """This rank's tensors of a tree shaped like the module.

    Args:
        path: the folder.
        folder: this rank's place.
        tree: its name, such as `state_dict`.
        experts: number of experts of those saved tensors whose dimension 0 counts experts.
    """
    parts = {
        place: folder.local_weight(place[1], saved, experts.get(place[1]))
        for place, saved in read_sizes(path).items()
        if place[0] == tree
    }
    load_parts(path, parts)
    return {place[1]: part.tensor for place, part in parts.items()}


def local_optimizer_state(
    path: str, folder: FolderLayout, index: int
) -> dict[str, dict[str, Tensor]]:
    """This rank's part of an optimizer's tensors, by parameter name and state key."""
    parts = {
        place: part
        for place, saved in read_sizes(path).items()
        if place[0] == f"optimizer_{index}"
        and (part := folder.local_moment(place[1], saved)) is not None
    }
    load_parts(path, parts)
    state: dict[str, dict[str, Tensor]] = {}
    for (_, name, key), part in parts.items():
        state.setdefault(name, {})[key] = part.tensor
    return state


def slice_weight(folder: FolderLayout, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a whole weight, as a single process saves it."""
    spec = folder.layout.specs.get(name)
    if spec is None or spec.num_shards == 1 or whole.shape[0] != spec.global_shape[0]:
        return whole
    start = spec.shard_index * spec.shape[0]
    return whole[start : start + spec.shape[0]].clone()


def slice_moment(folder: FolderLayout, name: str, whole: Tensor) -> Tensor:
    """This rank's flat part of a whole moment."""
    spec = folder.layout.specs[name]
    if math.prod(whole.shape) != spec.global_numel:
        return whole
    start = spec.shard_index * spec.numel + spec.chunk_start
    return whole.reshape(-1)[start : start + spec.chunk].clone()
