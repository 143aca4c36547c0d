"""Spread the experts of a module over ranks."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_moe.nn import Dispatcher, LocalDispatcher, MoE, moe_layers
from lightning_moe.parallel.collectives import AxisGroup
from lightning_moe.parallel.mesh import MeshShape


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
