"""The strategy's checkpoint hooks: folders that load at any number of ranks, and single files of other runs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe.optim.sharded import ShardedState, part_of
from lightning_moe.parallel import checkpoint as folders
from lightning_moe.parallel.layout import ParamLayout, plain_name
from lightning_moe.strategy.plain import plain, rank_state

# What `meta.pt` keeps under this key is needed to read the folder.
INFO: Final = "lightning_moe_folder"
MASTER: Final = "master"


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

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into tensors that are spread already."""
        return True

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

        Raises:
            RuntimeError: on a rank that is failing: the others are elsewhere, and waiting for them would hide the
                error that counts.
        """
        failing = sys.exc_info()[1]
        if failing is not None and not isinstance(failing, SIGTERMException):
            raise RuntimeError(
                f"no checkpoint at {filepath}: saving needs all ranks, and this one has stopped with "
                f"{type(failing).__name__}: {failing}"
            )
        if storage_options is not None:
            raise TypeError("ExpertParallelStrategy saves folders, which take no storage_options")
        folder = folders.FolderLayout(self._layout())
        trees = self._model_trees(folder, checkpoint)
        optimizers = checkpoint.pop("optimizer_states", None)
        info: dict[str, Any] = {
            "experts": folder.expert_counts(),
            "trees": list(trees),
            "optimizers": None,
        }
        if optimizers is not None:
            info["optimizers"] = [
                self._split_off_tensors(folder, i, saved, trees)
                for i, saved in enumerate(optimizers)
            ]
        info["ranks"] = _gathered(rank_state(checkpoint))
        world = folders.World(is_first=self.is_global_zero, barrier=self.barrier)  # type: ignore[attr-defined]
        meta = {**plain(checkpoint), INFO: plain(info)}
        folders.save_folder(str(self.broadcast(str(filepath))), trees, meta, world)  # type: ignore[attr-defined]

    def _model_trees(
        self, folder: folders.FolderLayout, checkpoint: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Take the weights, and what else holds a tensor per expert weight, out of the checkpoint."""
        experts = folder.expert_counts()
        trees = {}
        for key, value in list(checkpoint.items()):
            names = (
                {plain_name(str(name)) for name in value} if isinstance(value, Mapping) else set()
            )
            if key == "state_dict" or (experts and names.issuperset(experts)):
                trees[key] = {
                    plain_name(name): folder.weight(plain_name(name), tensor)
                    for name, tensor in checkpoint.pop(key).items()
                    if isinstance(tensor, Tensor)
                }
        return trees

    @staticmethod
    def _split_off_tensors(
        folder: folders.FolderLayout,
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
            ValueError: if what is there is no checkpoint, is cut short, or needs code to be loaded.
        """
        path = folders.existing_path(str(self.broadcast(str(checkpoint_path))))  # type: ignore[attr-defined]
        folder = folders.FolderLayout(self._layout())
        try:
            if folders.is_folder(path):
                return self._load_folder(path, folder)
            return self._load_file(path, folder, weights_only)
        except (EOFError, UnpicklingError, RuntimeError) as error:
            raise ValueError(f"ckpt_path={path} is not a readable checkpoint: {error}") from error

    def _load_folder(self, path: str, folder: folders.FolderLayout) -> dict[str, Any]:
        checkpoint = folders.read_meta(path)
        info = checkpoint.pop(INFO)
        for tree in info["trees"]:
            checkpoint[tree] = folders.local_tree(path, folder, tree, info["experts"])
        if info["optimizers"] is not None and self.optimizers:
            checkpoint["optimizer_states"] = [
                {
                    "state": _merged(
                        folders.local_optimizer_state(path, folder, i), saved["plain"]
                    ),
                    "param_groups": saved["param_groups"],
                }
                for i, saved in enumerate(info["optimizers"])
            ]
        self._restore_rank(checkpoint, info["ranks"])
        return checkpoint

    def _load_file(
        self, path: str, folder: folders.FolderLayout, weights_only: bool | None
    ) -> dict[str, Any]:
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=weights_only is not False
        )
        if "state_dict" not in checkpoint:
            raise ValueError(f"ckpt_path={path} is no Lightning checkpoint: it has no state_dict")
        checkpoint["state_dict"] = {
            name: folders.slice_weight(folder, plain_name(name), tensor)
            for name, tensor in checkpoint["state_dict"].items()
        }
        if INFO in checkpoint:  # a folder that was consolidated into one file
            saved = checkpoint.pop(INFO)["optimizers"] or []
            states = [checkpoint.pop(f"optimizer_{i}", {}) for i in range(len(saved))]
            whole = [
                {"state": _merged(state, kept["plain"]), "param_groups": kept["param_groups"]}
                for state, kept in zip(states, saved, strict=True)
            ]
        else:
            whole = [
                self._by_name(i, state)
                for i, state in enumerate(checkpoint.get("optimizer_states", []))
            ]
        if whole and self.optimizers:
            for optimizer in whole:
                for name, state in optimizer["state"].items():
                    for key, value in state.items():
                        if isinstance(value, Tensor) and value.dim():
                            state[key] = folders.slice_moment(folder, name, value)
            checkpoint["optimizer_states"] = whole
        return checkpoint

    def _by_name(self, index: int, saved: dict[str, Any]) -> dict[str, Any]:
        """A torch optimizer's state, which counts parameters, keyed by the names this run has in the same places."""
        if index >= len(self.optimizers):
            return {"state": {}, "param_groups": []}
        names = self._optimizer_names()
        own = [[names[p] for p in group["params"]] for group in self.optimizers[index].param_groups]
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != [len(group) for group in own]:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {sizes} parameters, this run's {[len(g) for g in own]}"
            )
        name_of = {
            number: name
            for group, group_names in zip(saved["param_groups"], own, strict=True)
            for number, name in zip(group["params"], group_names, strict=True)
        }
        return {
            "state": {name_of[number]: dict(state) for number, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": group_names}
                for group, group_names in zip(saved["param_groups"], own, strict=True)
            ],
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Local weights into the module; torch's own message names missing and unexpected ones."""
        assert self.lightning_module is not None
        wanted = {plain_name(name): name for name in self.lightning_module.state_dict()}
        state = {
            wanted.get(plain_name(name), name): t for name, t in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)
        if self.sharded is not None:
            self.sharded.refresh_masters()

    @torch.no_grad()
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Local parts of moments and masters, and the groups' options, into this run's optimizers."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = {name: p for p, name in self._optimizer_names().items()}
            self._load_groups(optimizer, saved["param_groups"])
            for name, state in saved["state"].items():
                target = parameters[name]
                master = state.pop(MASTER, None)
                if master is not None:
                    self._load_master(name, master)
                if state:
                    optimizer.state[target] = {
                        key: _fitting(value, target) for key, value in state.items()
                    }

    def _load_groups(self, optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
        names = self._optimizer_names()
        own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        if own != [group["params"] for group in saved]:
            raise ValueError(
                "the checkpoint's optimizer groups other parameters than this run's; load weights only, or use the "
                "optimizer of the saved run"
            )
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    def _load_master(self, name: str, master: Tensor) -> None:
        """Into the master, or into the weight itself where this run keeps it wide."""
        layout, spec = self._layout(), self._layout().specs[name]
        if self.sharded is not None and name in self.sharded.targets:
            self.sharded.targets[name].copy_(master)
            self.sharded.publish()
        else:
            part_of(layout.parameters[name], spec).copy_(master)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _layout(self) -> ParamLayout:
        assert self.layout is not None
        return self.layout

    def _optimizer_names(self) -> dict[Tensor, str]:
        """Name of what each optimizer parameter stands for."""
        names: dict[Tensor, str] = {p: name for p, name in self._layout().name_of().items()}  # noqa: C416 - widens the key type
        if self.sharded is not None:
            names.update({target: name for name, target in self.sharded.targets.items()})
        return names

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


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _merged(
    tensors: dict[str, dict[str, Any]], others: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    return {
        name: {**tensors.get(name, {}), **others.get(name, {})} for name in {**tensors, **others}
    }


def _fitting(value: Any, target: Tensor) -> Any:  # noqa: ANN401 - optimizers keep tensors and numbers
    if not isinstance(value, Tensor):
        return value
    if not value.dim():
        # AdamW counts steps in a float32 tensor that lives with its kernels.
        return value.to(target.device)
    return value.view(target.shape).to(device=target.device, dtype=target.dtype)
