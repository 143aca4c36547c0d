"""The strategy's checkpoint hooks: folders that load at any number of ranks, and single files of other runs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe.checkpoint import folder as folders
from lightning_moe.checkpoint.folder import INFO, MASTER
from lightning_moe.checkpoint.optimizer_states import (
    by_name,
    check_groups,
    fitting,
    merged,
    split_off_tensors,
)
from lightning_moe.checkpoint.parts import FolderLayout
from lightning_moe.checkpoint.trees import take_trees
from lightning_moe.checkpoint.whole import read_file
from lightning_moe.optim.sharded import ShardedState, part_of
from lightning_moe.parallel.collectives import gather_objects
from lightning_moe.parallel.layout import ParamLayout, plain_name
from lightning_moe.strategy.joint_errors import agree, jointly
from lightning_moe.strategy.plain import plain, rank_state


class FolderCheckpoints(DDPStrategy):
    """Checkpoints as folders, for the strategy that owns the attributes below.

    A `state_dict` in memory always holds local tensors by name, and an optimizer's state local parts by name; the
    folder alone knows global shapes.
    """

    layout: ParamLayout | None
    sharded: ShardedState | None
    _rng_to_restore: dict[str, Any] | None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into tensors that are spread already."""
        return True

    def on_train_start(self) -> None:
        """Refuse a plugin for single files, which would have no effect."""
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} has no effect on ExpertParallelStrategy, which writes folders "
                "from all ranks; remove it from the Trainer's plugins"
            )
        super().on_train_start()

    @property
    def failing(self) -> BaseException | None:
        """What has stopped this rank, while it cleans up after it: the other ranks are elsewhere."""
        assert self.lightning_module is not None
        error = sys.exc_info()[1]
        alone = self.lightning_module.trainer.interrupted and not isinstance(
            error, SIGTERMException
        )
        return error if alone else None

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, except where they won't come."""
        if self.lightning_module is None or self.failing is None:
            super().barrier(name)

    # ---- saving ----------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State and groups of this rank, by parameter name; `master` is a float32 weight of a narrower one."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names = self._optimizer_names()
        state: dict[str, dict[str, Any]] = {}
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {**options, "params": [names[parameter] for parameter in group["params"]]}
            )
            for parameter in group["params"]:
                name = names[parameter]
                state[name] = dict(optimizer.state.get(parameter, {}))
                if self._is_master(name):
                    state[name][MASTER] = parameter.detach()
        return {"state": state, "param_groups": groups}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: object = None,
    ) -> None:
        """Write a checkpoint folder; all ranks must call it.

        A rank that is failing says so and writes nothing: the others don't come, and waiting for them would hide the
        error that counts.

        Raises:
            RuntimeError: on all ranks, if one of them can't write; what was at `filepath` before is still there.
        """
        if self.failing is not None:
            sys.stderr.write(
                f"no checkpoint at {filepath}: saving needs all ranks, and this one was stopped by "
                f"{type(self.failing).__name__}\n"
            )
            return
        if storage_options is not None:
            raise TypeError("ExpertParallelStrategy saves folders, which take no storage_options")
        folder = self._folder()
        optimizers = checkpoint.pop("optimizer_states", None)
        trees, origins = take_trees(checkpoint, folder)
        info: dict[str, Any] = {
            "experts": folder.expert_counts(),
            "trees": origins,
            "optimizers": None,
        }
        if optimizers is not None:
            info["optimizers"] = []
            for i, saved in enumerate(optimizers):
                tensors, rest = split_off_tensors(saved, folder)
                info["optimizers"].append(rest)
                if tensors:
                    trees[f"optimizer_{i}"] = tensors
        info["ranks"] = gather_objects(rank_state(checkpoint))
        path = str(self.broadcast(str(filepath)))
        world = folders.World(is_first=self.is_global_zero, agree=lambda p: agree(p, path))
        folders.save_folder(path, trees, {**plain(checkpoint), INFO: plain(info)}, world)

    # ---- loading ---------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """This rank's part of a checkpoint folder, of a consolidated one, or of a single-process Lightning file.

        Raises:
            FileNotFoundError: if there is nothing at the path.
            ValueError: if what is there is no checkpoint, is cut short, or needs code to be loaded. Either on all
                ranks.
        """
        path = str(self.broadcast(str(checkpoint_path)))
        self._rng_to_restore = None
        folder = self._folder()
        found = jointly(lambda: folders.existing_path(path), path)
        if jointly(lambda: folders.is_folder(found), path):
            return self._load_folder(found, folder)
        return jointly(lambda: self._load_file(found, folder, weights_only), path)

    def _load_folder(self, path: str, folder: FolderLayout) -> dict[str, Any]:
        checkpoint = jointly(lambda: folders.read_meta(path), path)
        sizes = jointly(lambda: folders.read_sizes(path), path)
        info = checkpoint[INFO]
        resume = info["optimizers"] is not None and bool(self.optimizers)
        parts = folders.local_parts(folder, sizes, info, optimizers=resume)
        try:
            tensors = folders.load_parts(path, parts)
        except folders.UNREADABLE as error:
            raise ValueError(f"{path} is not a readable checkpoint: {error}") from error
        folders.merge_trees(checkpoint, tensors)
        del checkpoint[INFO]
        if resume:
            checkpoint["optimizer_states"] = [
                merged(tensors.get(f"optimizer_{i}", {}), saved)
                for i, saved in enumerate(info["optimizers"])
            ]
            self._restore_rank(checkpoint, info["ranks"])
        return checkpoint

    def _load_file(
        self, path: str, folder: FolderLayout, weights_only: bool | None
    ) -> dict[str, Any]:
        checkpoint = read_file(path, weights_only=weights_only is not False)
        checkpoint["state_dict"] = {
            name: folder.slice_weight(plain_name(name), tensor)
            if isinstance(tensor, Tensor)
            else tensor
            for name, tensor in checkpoint["state_dict"].items()
        }
        states = checkpoint.get("optimizer_states")
        # Another number of them is refused where they are loaded.
        if states and len(states) == len(self.optimizers):
            checkpoint["optimizer_states"] = [
                by_name(saved, self._group_names(own), folder)
                for saved, own in zip(states, self.optimizers, strict=True)
            ]
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Local weights into the module; torch's own message names missing and unexpected ones."""
        assert self.lightning_module is not None
        wanted = {plain_name(name): name for name in self.lightning_module.state_dict()}
        state = {
            wanted.get(plain_name(name), name): t for name, t in checkpoint["state_dict"].items()
        }
        unfit = self.lightning_module.load_state_dict(state, strict=strict)
        if unfit.missing_keys or unfit.unexpected_keys:
            rank_zero_warn(
                f"strict_loading=False: the checkpoint lacks {unfit.missing_keys} and has {unfit.unexpected_keys}, "
                "which the module doesn't have"
            )
        if self.sharded is not None:
            self.sharded.refresh_masters()
            self._widen_masters(checkpoint["state_dict"])

    @torch.no_grad()
    def _widen_masters(self, weights: Mapping[str, Any]) -> None:
        """Masters of narrow weights take what the checkpoint holds, before it is rounded."""
        assert self.sharded is not None
        for name, target in self.sharded.targets.items():
            if name in weights and self._is_master(name):
                target.copy_(part_of(weights[name], self._layout().specs[name]))

    @torch.no_grad()
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Local parts of moments and masters, and the groups' options, into this run's optimizers.

        Raises:
            ValueError: if the checkpoint's optimizers are others than this run's.
        """
        self.load_moments(checkpoint)
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in options.items() if key != "params"})

    @torch.no_grad()
    def load_moments(self, checkpoint: Mapping[str, Any]) -> None:
        """The same without the groups' options.

        Raises:
            ValueError: if the checkpoint's optimizers are others than this run's.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint holds the state of {len(states)} optimizers, this run has {len(self.optimizers)}"
            )
        parameters = {name: p for p, name in self._optimizer_names().items()}
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            check_groups(saved["param_groups"], self._group_names(optimizer))
            for name, state in saved["state"].items():
                target = parameters[name]
                if MASTER in state:
                    self._load_master(name, state.pop(MASTER))
                if state:
                    optimizer.state[target] = {
                        key: fitting(value, target, f"{key} of {name}")
                        for key, value in state.items()
                    }
        if self.sharded is not None:
            self.sharded.publish()

    def _load_master(self, name: str, master: Tensor) -> None:
        """Into the master, or into the weight itself where this run keeps it wide."""
        layout, spec = self._layout(), self._layout().specs[name]
        if self.sharded is not None and name in self.sharded.targets:
            self.sharded.targets[name].copy_(master.view_as(self.sharded.targets[name]))
        else:
            part_of(layout.parameters[name], spec).copy_(master.view(-1))

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _layout(self) -> ParamLayout:
        assert self.layout is not None
        return self.layout

    def _folder(self) -> FolderLayout:
        assert self.lightning_module is not None
        known = self._layout().name_of()
        aliases = {
            plain_name(name): known[parameter]
            for name, parameter in self.lightning_module.named_parameters(remove_duplicate=False)
        }
        return FolderLayout(self._layout(), aliases)

    def _optimizer_names(self) -> dict[Tensor, str]:
        """Name of what each optimizer parameter stands for."""
        names = self._layout().name_of()
        if self.sharded is not None:
            names.update({target: name for name, target in self.sharded.targets.items()})
        return names

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = self._optimizer_names()
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    def _is_master(self, name: str) -> bool:
        targets = self.sharded.targets if self.sharded is not None else {}
        return name in targets and targets[name].dtype != self._layout().parameters[name].dtype

    def _restore_rank(self, checkpoint: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Random numbers and loader positions of this rank, where the number of ranks is the same."""
        rank = dist.get_rank()
        if len(ranks) == dist.get_world_size():
            self._rng_to_restore = ranks[rank]["rng"]
            if ranks[rank]["loaders"] is not None:
                checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = ranks[rank][
                    "loaders"
                ]
