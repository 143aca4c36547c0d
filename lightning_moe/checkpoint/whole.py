"""Checkpoints as one process would have written them: no ranks are needed to read a folder."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor, nn

from lightning_moe.checkpoint.folder import existing_path, is_folder, load_parts
from lightning_moe.checkpoint.joint_errors import UNREADABLE
from lightning_moe.checkpoint.outline import INFO, Outline, read_outline
from lightning_moe.checkpoint.trees import Tree, put_trees


def read_whole(
    path: str | Path, *, weights_only: bool = True, optimizers: bool = True
) -> dict[str, Any]:
    """A checkpoint in Lightning's own format, with all experts and whole moments, on the CPU.

    Any other strategy can resume from it, once `torch.save` has written it to a file.

    Args:
        path: a folder of `ExpertParallelStrategy`, the file that Lightning's `consolidate_checkpoint` makes of it, or
            an ordinary checkpoint file; local, or any fsspec URL.
        weights_only: refuse a file that would run code. Folders never do.
        optimizers: read their state as well; of a file, whose tensors are mapped and not read, it is left out only.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if what is there is no checkpoint, is cut short, or needs code to be loaded.
    """
    found = existing_path(str(path))
    try:
        if is_folder(found):
            outline = read_outline(found)
            outline = outline if optimizers else replace(outline, optimizers=None)
            parts = outline.whole_parts(optimizers=optimizers)
            return _single_process_format(outline, load_parts(found, parts, alone=True))
        content = read_file(found, weights_only=weights_only)
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    if not optimizers:
        content.pop("optimizer_states", None)
    return content


def read_without_tensors(path: str | Path) -> dict[str, Any]:
    """A checkpoint in any of the formats of `read_whole`, its weights on the meta device: no tensor is read.

    Raises:
        FileNotFoundError, ValueError: as `read_whole`.
    """
    found = existing_path(str(path))
    try:
        if is_folder(found):
            return read_outline(found).without_tensors()
        content = read_file(found, device="meta")
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
    content.pop("optimizer_states", None)
    return content


def load_weights(module: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Weights of a checkpoint, in any of the formats of `read_whole`, into a module on one process.

    Raises:
        FileNotFoundError, ValueError: as `read_whole`.
        RuntimeError: naming what is missing, unexpected or of another shape.
    """
    weights = read_whole(path, optimizers=False)["state_dict"]
    module.load_state_dict(weights, strict=strict)


def read_file(path: str, *, weights_only: bool = True, device: str = "cpu") -> dict[str, Any]:
    """The content of a checkpoint file, also of a consolidated one, in Lightning's own format, on `device`.

    Raises:
        ValueError: if it holds something else.
    """
    if "://" in path:
        fs, _ = url_to_fs(path)
        with fs.open(path, "rb") as file:
            content: object = torch.load(file, map_location=device, weights_only=weights_only)
    else:
        content = torch.load(path, map_location=device, weights_only=weights_only, mmap=True)
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is no Lightning checkpoint: it has no state_dict")
    if INFO not in content:
        return content
    outline = Outline.of(content, {})
    names = [*outline.origins, *(f"optimizer_{i}" for i in range(len(outline.optimizers or ())))]
    trees = {name: outline.meta.pop(name) for name in names if name in outline.meta}
    return _single_process_format(outline, trees)


def _single_process_format(outline: Outline, trees: Tree) -> dict[str, Any]:
    checkpoint = put_trees(outline.meta, trees, outline.origins)
    if outline.optimizers is not None:
        checkpoint["optimizer_states"] = [
            _torch_format(trees.get(f"optimizer_{i}", {}), saved, checkpoint["state_dict"])
            for i, saved in enumerate(outline.optimizers)
        ]
    return checkpoint


def _torch_format(
    tensors: Tree, saved: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """State by number, as `torch.optim.Optimizer.state_dict` has it; `param_names` keeps the names."""
    numbers: dict[str, int] = {}
    groups = []
    for group in saved["param_groups"]:
        first = len(numbers)
        numbers |= {name: first + i for i, name in enumerate(group["params"])}
        groups.append(
            group
            | {
                "params": [numbers[name] for name in group["params"]],
                "param_names": group["params"],
            }
        )
    state = {
        number: {key: _shaped(value, weights[name]) for key, value in tensors.get(name, {}).items()}
        | saved["plain"].get(name, {})
        for name, number in numbers.items()
        if name in tensors or name in saved["plain"]
    }
    return {"state": state, "param_groups": groups}


def _shaped(value: Tensor, weight: Tensor) -> Tensor:
    whole = value.numel() == math.prod(weight.shape) and value.dim() > 0
    return value.view(weight.shape) if whole else value
