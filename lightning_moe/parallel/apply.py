"""Spread the experts of a module over ranks."""

from collections.abc import Callable

from torch import nn

from lightning_moe.nn import Dispatcher, MoE
from lightning_moe.parallel.mesh import MeshShape


def apply_expert_parallel(
    module: nn.Module, shape: MeshShape, rank: int, make_dispatcher: Callable[[MoE], Dispatcher]
) -> None:
    """Keep this rank's experts in every MoE layer of `module` and swap in a dispatcher that reaches the others.

    Works on meta tensors as well, and changes nothing in a module that is spread this way already.

    Args:
        module: any module that contains `MoE` layers.
        shape: the layout.
        rank: this rank.
        make_dispatcher: gives the dispatcher of one layer.

    Raises:
        ValueError: if a layer's experts can't be spread evenly; before anything is changed.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    kept = [shape.experts_of(rank, layer.config.num_experts) for layer in layers]
    for layer, expert_ids in zip(layers, kept, strict=True):
        layer.experts.keep_(expert_ids)
        if shape.ep > 1:
            layer.dispatcher = make_dispatcher(layer)
