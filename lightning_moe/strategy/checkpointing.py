"""The strategy's checkpoint hooks: folders that load at any number of ranks, and single files of other runs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe.optim.sharded import ShardedState, part_of
from lightning_moe.parallel import checkpoint as folders
from lightning_moe.parallel.checkpoint import INFO, MASTER, FolderLayout
from lightning_moe.parallel.collectives import gather_objects
from lightning_moe.parallel.layout import ParamLayout, plain_name
from lightning_moe.parallel.whole_checkpoint import read_file
from lightning_moe.strategy.joint_errors import agree, jointly
from lightning_moe.strategy.plain import plain, rank_state
from lightning_moe.strategy.trees import take_trees


class FolderCheckpoints:
    """Mixed into the strategy, which owns the attributes below.

    A `state_dict` in memory always holds local tensors by name, and an optimizer's state local parts by name; the
    folder alone knows global shapes.
    """

    layout: ParamLayout | None
    sharded: ShardedState | None
    optimizers: list[Optimizer]
    lightning_module: L.LightningModule | None
    is_global_zero: bool
    checkpoint_io: CheckpointIO
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
        super().on_train_start()  # type: ignore[misc]

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
            super().barrier(name)  # type: ignore[misc]

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
        storage_options: Any | None = None,  # noqa: ANN401 - Lightning's signature
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
            info["optimizers"] = [
                self._split_off_tensors(folder, i, saved, trees)
                for i, saved in enumerate(optimizers)
            ]
        info["ranks"] = gather_objects(rank_state(checkpoint))
        path = str(self.broadcast(str(filepath)))  # type: ignore[attr-defined]
        world = folders.World(is_first=self.is_global_zero, agree=lambda p: agree(p, path))
        folders.save_folder(path, trees, {**plain(checkpoint), INFO: plain(info)}, world)

    @staticmethod
    def _split_off_tensors(
        folder: FolderLayout,
        index: int,
        saved: dict[str, Any],
        trees: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """Tensors into `trees`; groups and plain values are what stays."""
        plain_values: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, folders.Part]] = {}
        for name, state in saved["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors.setdefault(name, {})[key] = folder.moment(name, value)
                else:
                    plain_values.setdefault(name, {})[key] = value
        if tensors:
            trees[f"optimizer_{index}"] = tensors
        return {"param_groups": saved["param_groups"], "plain": plain_values}

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
        path = str(self.broadcast(str(checkpoint_path)))  # type: ignore[attr-defined]
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
                {
                    "state": _merged(tensors.get(f"optimizer_{i}", {}), saved["plain"]),
                    "param_groups": saved["param_groups"],
                }
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
        if "optimizer_states" in checkpoint and self.optimizers:
            checkpoint["optimizer_states"] = [
                self._by_name(i, state, folder)
                for i, state in enumerate(checkpoint["optimizer_states"])
            ]
        return checkpoint

    def _by_name(self, index: int, saved: dict[str, Any], folder: FolderLayout) -> dict[str, Any]:
        """Local parts of a torch optimizer's state, which counts parameters, by the names they have in this run."""
        if index >= len(self.optimizers):
            return {"state": {}, "param_groups": []}
        own = self._group_names(self.optimizers[index])
        groups = saved["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group) for group in own]:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, this run's {[len(g) for g in own]}; "
                "load weights only, or use the optimizer of the saved run"
            )
        names = [group.get("param_names", mine) for group, mine in zip(groups, own, strict=True)]
        name_of = {
            number: name
            for group, group_names in zip(groups, names, strict=True)
            for number, name in zip(group["params"], group_names, strict=True)
        }
        return {
            "state": {
                name_of[number]: {
                    key: folder.slice_moment(name_of[number], value)
                    if isinstance(value, Tensor) and value.dim() and name_of[number] in folder.specs
                    else value
                    for key, value in state.items()
                }
                for number, state in saved["state"].items()
            },
            "param_groups": [
                {key: value for key, value in group.items() if key != "param_names"}
                | {"params": group_names}
                for group, group_names in zip(groups, names, strict=True)
            ],
        }

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
            self._check_groups(optimizer, saved["param_groups"])
            for name, state in saved["state"].items():
                target = parameters[name]
                if MASTER in state:
                    self._load_master(name, state.pop(MASTER))
                if state:
                    optimizer.state[target] = {
                        key: _fitting(value, target, f"{key} of {name}")
                        for key, value in state.items()
                    }
        if self.sharded is not None:
            self.sharded.publish()

    def _check_groups(self, optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
        own, theirs = self._group_names(optimizer), [group["params"] for group in saved]
        if own != theirs:
            mine, others = {n for g in own for n in g}, {n for g in theirs for n in g}
            difference = sorted(mine ^ others)[:3] or "the same, in other groups or another order"
            raise ValueError(
                f"the checkpoint's optimizer holds other parameters than this run's ({difference}); load weights only, "
                "or use the optimizer of the saved run"
            )

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
        names: dict[Tensor, str] = {p: name for p, name in self._layout().name_of().items()}  # noqa: C416 - widens the key type
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


def _merged(
    tensors: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    return {
        name: {**tensors.get(name, {}), **others.get(name, {})} for name in {**tensors, **others}
    }


def _fitting(value: Any, target: Tensor, what: str) -> Any:  # noqa: ANN401 - optimizers keep tensors and numbers
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        # AdamW counts steps in a float32 tensor that lives with its kernels.
        return value.to(target.device)
    if value.numel() != target.numel():
        raise ValueError(
            f"the checkpoint's {what} has {value.numel()} elements on this rank, the parameter {target.numel()}; was "
            "it saved by another optimizer or model?"
        )
    return value.view(target.shape).to(device=target.device, dtype=target.dtype)
