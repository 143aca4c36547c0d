"""Saving and loading a run on ranks: folders that load at any number of ranks, and single files of other runs."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.checkpoint.folder import existing_path, is_folder, load_parts, save_folder
from lightning_moe.checkpoint.joint_errors import UNREADABLE, jointly
from lightning_moe.checkpoint.optimizer_states import (
    MASTER,
    by_name,
    check_groups,
    fitting,
    merged,
    split_off_tensors,
)
from lightning_moe.checkpoint.outline import Outline, read_outline
from lightning_moe.checkpoint.parts import Parts
from lightning_moe.checkpoint.rank_state import rank_state, restore_rng
from lightning_moe.checkpoint.trees import put_trees, take_trees
from lightning_moe.checkpoint.whole import read_file
from lightning_moe.parallel.collectives import gather_objects
from lightning_moe.parallel.layout import ParamLayout, plain_name


@runtime_checkable
class Masters(Protocol):
    """Parameters of optimizers that aren't the module's own, as `optim.sharded.ShardedState` has them."""

    targets: dict[str, nn.Parameter]

    def refresh_masters(self) -> None:
        """Take their values from the module's weights."""

    def publish(self) -> None:
        """Give their values to the module's weights."""


class Checkpoints:
    """Saves and loads this rank's part of a module and of its optimizers.

    A state dict in memory always holds local tensors by name, and an optimizer's state local parts by name; the
    folder alone knows global shapes.

    Args:
        module: with its experts spread.
        optimizers: of the module; none outside of fit.
        layout: of the module.
        masters: what the optimizers hold in place of the module's parameters; None if they hold those.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        layout: ParamLayout,
        masters: Masters | None,
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._layout = layout
        self._masters = masters
        targets = masters.targets if masters is not None else {}
        self._owners = {name: targets.get(name, p) for name, p in layout.parameters.items()}
        self._names = layout.name_of() | {owner: name for name, owner in self._owners.items()}
        self._rng: dict[str, Any] | None = None

    # ---- saving ----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State and groups of this rank, by parameter name; `master` is a float32 weight of a narrower one."""
        state: dict[str, dict[str, Any]] = {}
        groups = []
        for group, names in zip(optimizer.param_groups, self._group_names(optimizer), strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": names})
            for parameter, name in zip(group["params"], names, strict=True):
                state[name] = dict(optimizer.state.get(parameter, {}))
                if self._has_master(name):
                    state[name][MASTER] = parameter.detach()
        return {"state": state, "param_groups": groups}

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write a folder; all ranks call it. The first rank's path counts.

        Args:
            checkpoint: in Lightning's format, with states of `optimizer_state`; its tensors are taken out.
            path: local, or any fsspec URL.

        Raises:
            RuntimeError: on all ranks, if one of them can't write; what was at `path` before is still there.
        """
        parts = Parts.of_module(self._module, self._layout)
        states = checkpoint.pop("optimizer_states", None)
        trees, origins = take_trees(checkpoint, parts)
        optimizers: list[dict[str, Any]] | None = None if states is None else []
        for i, state in enumerate(states or ()):
            tensors, rest = split_off_tensors(state, parts)
            assert optimizers is not None
            optimizers.append(rest)
            if tensors:
                trees[f"optimizer_{i}"] = tensors
        outline = Outline(
            meta=checkpoint,
            tensors={},
            experts=parts.expert_counts(),
            origins=origins,
            optimizers=optimizers,
            ranks=gather_objects(rank_state(checkpoint)),
        )
        first_path, *_ = gather_objects(path)
        save_folder(first_path, trees, outline.content(), rank=self._layout.mesh.rank)

    # ---- loading ---------------------------------------------------------------------------------------------

    def load(self, path: str, *, weights_only: bool = True) -> dict[str, Any]:
        """This rank's part of a checkpoint folder, of a consolidated one, or of a single-process Lightning file.

        All ranks call it. The first rank's path counts.

        Raises:
            FileNotFoundError: if there is nothing at the path.
            ValueError: if what is there is no checkpoint, is cut short, or needs code to be loaded. Either on all
                ranks.
        """
        path, *_ = gather_objects(path)
        self._rng = None
        parts = Parts.of_module(self._module, self._layout)
        found = jointly(lambda: existing_path(path), path)
        if jointly(lambda: is_folder(found), path):
            return self._load_folder(found, parts)
        return jointly(lambda: self._load_file(found, parts, weights_only), path)

    def _load_folder(self, path: str, parts: Parts) -> dict[str, Any]:
        outline = jointly(lambda: read_outline(path), path)
        resume = outline.optimizers is not None and bool(self._optimizers)
        try:
            trees = load_parts(path, outline.local_parts(parts, optimizers=resume))
        except UNREADABLE as error:
            raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
        checkpoint = put_trees(outline.meta, trees, outline.origins)
        if resume:
            checkpoint["optimizer_states"] = [
                merged(trees.get(f"optimizer_{i}", {}), saved)
                for i, saved in enumerate(outline.optimizers or ())
            ]
            self._take_rank_state(outline.ranks, checkpoint)
        return checkpoint

    def _load_file(self, path: str, parts: Parts, weights_only: bool) -> dict[str, Any]:
        checkpoint = read_file(path, weights_only=weights_only)
        checkpoint["state_dict"] = {
            name: parts.slice_weight(plain_name(name), tensor)
            if isinstance(tensor, Tensor)
            else tensor
            for name, tensor in checkpoint["state_dict"].items()
        }
        states = checkpoint.get("optimizer_states")
        # Another number of them is refused where they are loaded.
        if states and len(states) == len(self._optimizers):
            checkpoint["optimizer_states"] = [
                by_name(saved, self._group_names(own), parts)
                for saved, own in zip(states, self._optimizers, strict=True)
            ]
        return checkpoint

    def _take_rank_state(self, ranks: list[dict[str, Any]], checkpoint: dict[str, Any]) -> None:
        """Random numbers and loader positions of this rank, where the number of ranks is the same."""
        mesh = self._layout.mesh
        if len(ranks) != mesh.shape.world:
            return
        self._rng = ranks[mesh.rank]["rng"]
        if (loaders := ranks[mesh.rank]["loaders"]) is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders

    def restore_random_numbers(self) -> None:
        """Go on with this rank's random numbers of a checkpoint that was loaded to resume from, once."""
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Any], *, strict: bool = True) -> None:
        """Local weights into the module; torch's own message names missing and unexpected ones."""
        wanted = {plain_name(name): name for name in self._module.state_dict()}
        state = {wanted.get(plain_name(name), name): value for name, value in weights.items()}
        unfit = self._module.load_state_dict(state, strict=strict)
        if unfit.missing_keys or unfit.unexpected_keys:
            rank_zero_warn(
                f"strict_loading=False: the checkpoint lacks {unfit.missing_keys} and has {unfit.unexpected_keys}, "
                "which the module doesn't have"
            )
        if self._masters is not None:
            self._masters.refresh_masters()
        # Masters take what the checkpoint holds, before it is rounded to the weight's type.
        for name, owner in self._owners.items():
            if name in weights and self._has_master(name):
                owner.copy_(self._layout.specs[name].part_of(weights[name]))

    def load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Local parts of moments and masters, and the groups' options, into the optimizers.

        Raises:
            ValueError: if they are states of other optimizers.
        """
        self.load_moments(states)
        for optimizer, saved in zip(self._optimizers, states, strict=True):
            for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in options.items() if key != "params"})

    @torch.no_grad()
    def load_moments(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The same without the groups' options.

        Raises:
            ValueError: if they are states of other optimizers.
        """
        if len(states) != len(self._optimizers):
            raise ValueError(
                f"the checkpoint holds the state of {len(states)} optimizers, this run has {len(self._optimizers)}"
            )
        for optimizer, saved in zip(self._optimizers, states, strict=True):
            check_groups(saved["param_groups"], self._group_names(optimizer))
            for name, state in saved["state"].items():
                owner = self._owners[name]
                if MASTER in state:
                    self._load_master(name, state.pop(MASTER))
                if state:
                    optimizer.state[owner] = {
                        key: fitting(value, owner, f"{key} of {name}")
                        for key, value in state.items()
                    }
        if self._masters is not None:
            self._masters.publish()

    def _load_master(self, name: str, master: Tensor) -> None:
        """Into the master, or into the weight itself where this run keeps it wide."""
        owner, parameter = self._owners[name], self._layout.parameters[name]
        part = owner.view(-1) if owner is not parameter else self._layout.specs[name].part_of(owner)
        part.copy_(master.view(-1))

    # ---- names -----------------------------------------------------------------------------------------------

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        return [[self._names[p] for p in group["params"]] for group in optimizer.param_groups]

    def _has_master(self, name: str) -> bool:
        return self._owners[name].dtype != self._layout.parameters[name].dtype
