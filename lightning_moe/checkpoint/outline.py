"""Outlines: what a checkpoint folder holds, by names and shapes, without reading a tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from fsspec.core import url_to_fs
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_moe.checkpoint.metadata import folder_reader
from lightning_moe.checkpoint.parts import Part, Parts
from lightning_moe.checkpoint.rank_state import plain
from lightning_moe.checkpoint.trees import Origin, Tree, put_trees
from lightning_moe.parallel.layout import plain_name

META: Final = "meta.pt"
"""The file of a folder that holds everything but tensors, as plain types."""
INFO: Final = "lightning_moe_folder"
"""The key in it of what is needed to read the folder."""

Place = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A checkpoint without its tensors.

    Attributes:
        meta: everything else in it.
        tensors: global shape and type of every tensor, by its place in the trees.
        experts: number of experts, by the name of every weight whose dimension 0 counts them.
        origins: where each tree of weights was in the checkpoint.
        optimizers: for each optimizer, its groups and what in its state is no tensor; None if it was saved without.
        ranks: of every rank that wrote it, its random generators and loader positions.
    """

    meta: dict[str, Any]
    tensors: dict[Place, TensorStorageMetadata]
    experts: dict[str, int]
    origins: dict[str, Origin]
    optimizers: list[dict[str, Any]] | None
    ranks: list[dict[str, Any]]

    @classmethod
    def of(
        cls, content: Mapping[str, Any], tensors: dict[Place, TensorStorageMetadata]
    ) -> "Outline":
        """From what `meta.pt` holds (`content`)."""
        info = content[INFO]
        return cls(
            meta={key: value for key, value in content.items() if key != INFO},
            tensors=tensors,
            experts=info["experts"],
            origins={name: Origin(**origin) for name, origin in info["trees"].items()},
            optimizers=info["optimizers"],
            ranks=info["ranks"],
        )

    def content(self) -> dict[str, Any]:
        """What `meta.pt` is to hold."""
        info = {
            "experts": self.experts,
            "trees": {
                name: {"path": origin.path, "prefix": origin.prefix, "rest": origin.rest}
                for name, origin in self.origins.items()
            },
            "optimizers": self.optimizers,
            "ranks": self.ranks,
        }
        content: dict[str, Any] = plain({**self.meta, INFO: info})
        return content

    def local_parts(self, parts: Parts, *, optimizers: bool) -> dict[Place, Part]:
        """Empty parts for what this rank needs of the tensors; `optimizers`: theirs as well."""
        found: dict[Place, Part] = {}
        for place, saved in self.tensors.items():
            tree, name = place[0], place[1]
            if tree in self.origins:
                name = plain_name(name).removeprefix(self.origins[tree].prefix)
                found[place] = parts.local_weight(saved, self.experts.get(name))
            elif optimizers and (part := parts.local_moment(name, saved)) is not None:
                found[place] = part
        return found

    def without_tensors(self) -> dict[str, Any]:
        """The checkpoint with its weights on the meta device, and without the optimizers' state."""
        trees: dict[str, Tree] = {name: {} for name in self.origins}
        for (tree, name, *_), saved in self.tensors.items():
            if tree in trees:
                size, dtype = saved.size, saved.properties.dtype
                trees[tree][name] = torch.empty(size, dtype=dtype, device="meta")
        return put_trees(self.meta, trees, self.origins)

    def whole_parts(self, *, optimizers: bool = True) -> dict[Place, Part]:
        """Empty parts for all tensors, each whole; `optimizers`: theirs as well."""
        return {
            place: Part(
                tensor=torch.empty(saved.size, dtype=saved.properties.dtype),
                whole=tuple(saved.size),
                offsets=(0,) * len(saved.size),
            )
            for place, saved in self.tensors.items()
            if optimizers or place[0] in self.origins
        }


def read_outline(path: str) -> Outline:
    """The outline of a folder; it can't run code.

    Raises:
        ValueError: if another strategy wrote the folder, or a file of it is damaged.
    """
    fs, _ = url_to_fs(path)
    with fs.open(f"{path}/{META}", "rb") as file:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if INFO not in content:
        raise ValueError(f"{path} was written by another strategy, not by ExpertParallelStrategy")
    metadata = folder_reader(path).read_metadata()
    # Relies on the map from flat names to places that DefaultSavePlanner keeps.
    places = {
        tuple(str(key) for key in metadata.planner_data[name]): saved
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    return Outline.of(content, places)
