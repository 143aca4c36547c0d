"""Configs and weights of the system that made the golden values, in our names and layouts.

`data/` was computed with ai2-olmo-core 3.0.0 in float32 on a CPU. Layouts that differ: their router weight is flat
(E * D), their shared expert keeps (D, [up | gate]) and (1, F, D) where a Linear keeps the transpose.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lightning_moe.config import RouterConfig

DATA: Final = Path(__file__).parent / "data"

_ELSEWHERE: Final = {"d_model", "num_experts", "lb_loss_granularity"}
_SCOPES: Final = {"local_batch": "micro_batch", "instance": "sequence"}

_NAMES: Final = {
    "embeddings.weight": "embedding.weight",
    "lm_head.norm.weight": "final_norm.weight",
    "lm_head.w_out.weight": "head.weight",
    "attention.w_q.weight": "attention.q_proj.weight",
    "attention.w_k.weight": "attention.k_proj.weight",
    "attention.w_v.weight": "attention.v_proj.weight",
    "attention.w_out.weight": "attention.out_proj.weight",
    "attention.q_norm.weight": "attention.q_norm.weight",
    "attention.k_norm.weight": "attention.k_norm.weight",
    # Their default places norms after the sub-layers ("post" here).
    "attention_norm.weight": "attention_out_norm.weight",
    "feed_forward_norm.weight": "feed_forward_out_norm.weight",
    "routed_experts.w_up_gate": "feed_forward.experts.w_up_gate",
    "routed_experts.w_down": "feed_forward.experts.w_down",
    "routed_experts_router.weight": "feed_forward.router.weight",
    "shared_experts.w_up_gate": "feed_forward.shared.up_gate.weight",
    "shared_experts.w_down": "feed_forward.shared.down.weight",
}


def load_golden(name: str) -> Any:
    """The stored values; loading runs no code."""
    return torch.load(DATA / name, weights_only=True)


def router_config(fields: Mapping[str, Any]) -> RouterConfig:
    """Our config of a stored router; an option that we don't have raises a TypeError."""
    same = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    scope = _SCOPES[fields.get("lb_loss_granularity", "local_batch")]
    return RouterConfig(lb_loss_scope=scope, **same)


def convert_state(state: Mapping[str, Tensor], *, num_experts: int) -> dict[str, Tensor]:
    """Weights, or their gradients, of a whole model by our names. Every name must be known."""
    return {
        _our_name(name): _our_layout(name, tensor, num_experts) for name, tensor in state.items()
    }


def _our_name(name: str) -> str:
    if not name.startswith("blocks."):
        return _NAMES[name]
    _, layer, rest = name.split(".", maxsplit=2)
    return f"blocks.{layer}.{_NAMES[rest]}"


def _our_layout(name: str, tensor: Tensor, num_experts: int) -> Tensor:
    if name.endswith("routed_experts_router.weight"):
        return tensor.unflatten(0, (num_experts, -1))
    if name.endswith("shared_experts.w_up_gate"):
        return tensor.t()
    if name.endswith("shared_experts.w_down"):
        return tensor.squeeze(0).t()
    return tensor
