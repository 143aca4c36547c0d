"""An optimizer's state by parameter name, as folders keep it and as a single process saves it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from lightning_moe.checkpoint.parts import Part, Parts

MASTER: Final = "master"
"""The name, among an optimizer's tensors, of the float32 copy of a narrower weight."""

State = dict[str, dict[str, Any]]


def split_off_tensors(
    saved: Mapping[str, Any], parts: Parts
) -> tuple[dict[str, dict[str, Part]], dict[str, Any]]:
    """Tensors of a state by name, as parts of global ones; and its groups with the values that are no tensors."""
    plain_values: State = {}
    tensors: dict[str, dict[str, Part]] = {}
    for name, state in saved["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors.setdefault(name, {})[key] = parts.moment(name, value)
            else:
                plain_values.setdefault(name, {})[key] = value
    return tensors, {"param_groups": saved["param_groups"], "plain": plain_values}


def merged(tensors: State, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `split_off_tensors` took apart."""
    others: State = saved["plain"]
    names = {**tensors, **others}
    return {
        "state": {name: {**tensors.get(name, {}), **others.get(name, {})} for name in names},
        "param_groups": saved["param_groups"],
    }


def by_name(saved: Mapping[str, Any], own: Sequence[Sequence[str]], parts: Parts) -> dict[str, Any]:
    """Local parts of a torch optimizer's state, which counts parameters, by the names they have in this run.

    Args:
        saved: as `torch.optim.Optimizer.state_dict` gives it.
        own: names of the parameters in each group of this run.
        parts: which are this rank's.

    Raises:
        ValueError: if groups are of other sizes.
    """
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
                key: parts.slice_moment(name_of[number], value)
                if isinstance(value, Tensor) and value.dim() and name_of[number] in parts.specs
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


def check_groups(saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    """Check that groups of names are this run's.

    Raises:
        ValueError: if they aren't.
    """
    theirs = [group["params"] for group in saved]
    if own != theirs:
        mine, others = {n for g in own for n in g}, {n for g in theirs for n in g}
        difference = sorted(mine ^ others)[:3] or "the same, in other groups or another order"
        raise ValueError(
            f"the checkpoint's optimizer holds other parameters than this run's ({difference}); load weights only, "
            "or use the optimizer of the saved run"
        )


def fitting(value: object, target: Tensor, what: str) -> object:
    """A saved value, which may be a number, in the shape and type of the parameter that it belongs to.

    Raises:
        ValueError: if it has another number of elements.
    """
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
