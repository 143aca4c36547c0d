"""Equal values for replicas before the first step, and memory for tensors on the meta device."""

import torch
from torch import nn

from lightning_moe.nn import MoE, MoETransformer
from lightning_moe.nn.init import draw_seed
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.parallel.layout import ParamLayout


@torch.no_grad()
def sync_replicas(module: nn.Module, layout: ParamLayout) -> None:
    """Overwrite every replica of a parameter with the first one's values, and every buffer with the first rank's.

    Experts are copied between the replicas of that expert only: different experts stay different.
    """
    for name, parameter in layout.parameters.items():
        layout.replicas(layout.specs[name]).broadcast(parameter.data)
    for buffer in module.buffers():
        layout.mesh.stage.broadcast(buffer)


def materialize(module: nn.Module, device: torch.device, world: AxisGroup) -> None:
    """Give tensors that `configure_model` built on the meta device memory and initial values.

    All ranks use the first rank's seeds: what torch's generator would have given a build with memory. Experts are
    drawn by their global ids, so that the number of ranks doesn't matter.

    Raises:
        ValueError: if a submodule with meta tensors has no `reset_parameters` to fill them.
    """
    done: set[nn.Module] = set()
    for owner in module.modules():
        if owner not in done and any(map(_owns_meta, _reset_with(owner))):
            seed = torch.tensor(draw_seed(), device=device)
            world.broadcast(seed)
            _reset(owner, device, int(seed.item()))
            done.update(_reset_with(owner))


def _reset(owner: nn.Module, device: torch.device, seed: int) -> None:
    reset = getattr(owner, "reset_parameters", None)
    if reset is None:
        raise ValueError(
            f"{type(owner).__name__} holds tensors on the meta device and has no reset_parameters() to give them "
            "values; add it, or build the module without torch.device('meta')"
        )
    owner.to_empty(device=device, recurse=len(_reset_with(owner)) > 1)
    if isinstance(owner, MoE | MoETransformer):
        owner.reset_parameters(seed)
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        reset()


def _reset_with(owner: nn.Module) -> list[nn.Module]:
    """The modules that `owner.reset_parameters` fills: all below our transformer and MoE layer, else itself."""
    return list(owner.modules()) if isinstance(owner, MoE | MoETransformer) else [owner]


def _owns_meta(owner: nn.Module) -> bool:
    tensors = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
    return any(tensor.is_meta for tensor in tensors)
