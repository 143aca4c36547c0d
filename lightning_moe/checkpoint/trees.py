"""Trees: everything in a checkpoint that holds tensors of the model, wherever a callback has put it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_moe.checkpoint.parts import Parts
from lightning_moe.parallel.layout import plain_name

Tree = dict[str, Any]
"""Nested dicts with tensors, or parts of them, at the leaves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a tree of tensors was in a checkpoint.

    Attributes:
        path: keys that lead there.
        prefix: of the names in it, before those that the module has.
        rest: what in it is no tensor.
    """

    path: list[Any]
    prefix: str
    rest: dict[str, Any]


def take_trees(
    checkpoint: dict[str, Any], parts: Parts
) -> tuple[dict[str, Tree], dict[str, Origin]]:
    """Take the weights, and all else that holds a tensor per expert weight, out of the checkpoint.

    Callbacks keep averaged weights at depth and under a prefix. Left where they are, the experts of all but the first
    rank would be lost.

    Returns:
        Trees of `Part`s by name, and where each of them was.
    """
    experts = parts.expert_counts()
    trees: dict[str, Tree] = {}
    origins: dict[str, Origin] = {}
    for path, value, prefix in list(_model_shaped(checkpoint, experts, ())):
        tree = str(path[0]) if len(path) == 1 else f"extra_{len(trees)}"
        # Averaged weights keep torch.compile's names, which their callback looks for.
        name_of = plain_name if path == ("state_dict",) else str
        trees[tree] = {
            name_of(name): parts.weight(plain_name(name).removeprefix(prefix), tensor)
            for name, tensor in value.items()
            if isinstance(tensor, Tensor)
        }
        rest = {name: entry for name, entry in value.items() if not isinstance(entry, Tensor)}
        origins[tree] = Origin(path=list(path), prefix=prefix, rest=rest)
        branch = checkpoint
        for key in path[:-1]:
            branch = branch[key]
        del branch[path[-1]]
    return trees, origins


def put_trees(
    checkpoint: Mapping[str, Any], trees: Mapping[str, Tree], origins: Mapping[str, Origin]
) -> dict[str, Any]:
    """The checkpoint with trees of tensors where `take_trees` has found them."""
    filled = dict(checkpoint)
    for name, origin in origins.items():
        branch = filled
        for key in origin.path[:-1]:
            branch[key] = dict(branch[key])
            branch = branch[key]
        branch[origin.path[-1]] = trees.get(name, {}) | origin.rest
    return filled


def _model_shaped(
    value: Mapping[Any, Any], experts: Mapping[str, int], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any], str]]:
    for key, entry in value.items():
        if not isinstance(entry, Mapping):
            continue
        prefix = _prefix(entry, experts)
        if (*path, key) == ("state_dict",):
            yield (key,), entry, ""
        elif prefix is not None:
            yield (*path, key), entry, prefix
        else:
            yield from _model_shaped(entry, experts, (*path, key))


def _prefix(value: Mapping[Any, Any], experts: Mapping[str, int]) -> str | None:
    """What precedes the name of every expert weight in `value`; None if they aren't all there."""
    if not experts:
        return None
    names = {plain_name(str(name)) for name, entry in value.items() if isinstance(entry, Tensor)}
    first = next(iter(experts))
    for name in names:
        if name.endswith(first):
            prefix = name.removesuffix(first)
            if names.issuperset(prefix + expert for expert in experts):
                return prefix
    return None
