"""Modules of an MoE transformer: parameters, and calls into `ops`."""

from lightning_moe.nn.attention import Attention, register_attention_backend
from lightning_moe.nn.block import Block
from lightning_moe.nn.dispatch import Dispatched, Dispatcher, LocalDispatcher
from lightning_moe.nn.expert_backends import register_expert_backend
from lightning_moe.nn.experts import Experts, routed_experts
from lightning_moe.nn.latent import LatentProjections
from lightning_moe.nn.mlp import MLP
from lightning_moe.nn.moe import MoE, moe_layers, named_moe_layers
from lightning_moe.nn.offload import offloaded
from lightning_moe.nn.recompute import recomputed
from lightning_moe.nn.router import Router
from lightning_moe.nn.router_losses import balance_loss
from lightning_moe.nn.transformer import MoETransformer
from lightning_moe.ops.losses import z_loss
from lightning_moe.ops.records import Routing, TokenRoutes

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Dispatched",
    "Dispatcher",
    "Experts",
    "LatentProjections",
    "LocalDispatcher",
    "MoE",
    "MoETransformer",
    "Router",
    "Routing",
    "TokenRoutes",
    "balance_loss",
    "moe_layers",
    "named_moe_layers",
    "offloaded",
    "recomputed",
    "register_attention_backend",
    "register_expert_backend",
    "routed_experts",
    "z_loss",
]
