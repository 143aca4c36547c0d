"""The place where parts of a module are swapped so that ranks share it out."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_moe.nn import Dispatcher, LocalDispatcher, MoE, moe_layers
from lightning_moe.parallel.collectives import AxisGroup, ProcessMesh
from lightning_moe.parallel.mesh import MeshShape
from lightning_moe.parallel.replicas import materialize


def place(
    module: nn.Module,
    mesh: ProcessMesh,
    make_dispatcher: Callable[[MoE], Dispatcher],
    *,
    device: torch.device | None = None,
) -> None:
    """Make a module this rank's part of the whole, step by step in the order below.

    All ranks call it. What is placed already stays as it is.

    Args:
        module: with names and shapes; on the meta device it needs no memory before the last step.
        mesh: the ranks.
        make_dispatcher: gives the dispatcher of one layer.
        device: where parameters get memory; None leaves them without.

    Raises:
        ValueError: if the module can't be shared out so; before anything is changed.
    """
    apply_expert_parallel(module, mesh.shape, mesh.rank, make_dispatcher)
    if device is not None:
        materialize(module, device, mesh.world)


def apply_expert_parallel(
    module: nn.Module, shape: MeshShape, rank: int, make_dispatcher: Callable[[MoE], Dispatcher]
) -> None:
    """Keep this rank's experts in every MoE layer of `module`, and give it a dispatcher that reaches the others.

    Works on meta tensors as well, and changes nothing in a module that is spread this way already.

    Args:
        module: any module that contains `MoE` layers.
        shape: the layout.
        rank: this rank.
        make_dispatcher: gives the dispatcher of one layer.

    Raises:
        ValueError: if a layer's experts can't be spread evenly; before anything is changed.
    """
    layers = moe_layers(module)
    kept = [shape.experts_of(rank, layer.config.num_experts) for layer in layers]
    for layer, expert_ids in zip(layers, kept, strict=True):
        layer.experts.keep_(expert_ids)
        layer.dispatcher = make_dispatcher(layer)


@torch.no_grad()
def gather_experts(module: nn.Module, group: AxisGroup) -> None:
    """Give every rank of the expert-parallel group all experts, and the dispatcher of a single rank.

    All ranks call it. Optimizers and hooks still hold the old parameters.
    """
    for layer in moe_layers(module):
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            whole = parameter.new_empty(layer.config.num_experts, *parameter.shape[1:])
            group.all_gather(whole, parameter.detach().contiguous())
            setattr(layer.experts, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        layer.experts.expert_ids = range(layer.config.num_experts)
        layer.dispatcher = LocalDispatcher()
