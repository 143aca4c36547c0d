"""Communication between ranks: meshes, collectives, transports, reduction and clipping of gradients."""

from lightning_moe.parallel.apply import apply_expert_parallel
from lightning_moe.parallel.collectives import AxisGroup, Ledger, ProcessMesh
from lightning_moe.parallel.layout import ParamLayout, ParamSpec
from lightning_moe.parallel.mesh import MeshShape, resolve_expert_parallel
from lightning_moe.parallel.reducer import GradientReducer
from lightning_moe.parallel.transports import (
    AllToAllDispatch,
    AllToAllDispatcher,
    StaticDispatch,
    StaticDispatcher,
    Transport,
    register_transport,
)

__all__ = [
    "AllToAllDispatch",
    "AllToAllDispatcher",
    "AxisGroup",
    "GradientReducer",
    "Ledger",
    "MeshShape",
    "ParamLayout",
    "ParamSpec",
    "ProcessMesh",
    "StaticDispatch",
    "StaticDispatcher",
    "Transport",
    "apply_expert_parallel",
    "register_transport",
    "resolve_expert_parallel",
]
