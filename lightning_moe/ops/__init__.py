"""Pure functions of tensors: routing, permutation, expert matmuls, losses, load statistics.

No function here keeps state or knows about modules, configs, ranks or loggers; all work in float64 on a CPU.
A tensor's name ends in its shape. The letters, for the whole package:

    B  batch (sequences)
    S  positions of one sequence
    T  tokens (usually B * S)
    D  model width
    W  width that the routed experts read (D, or the latent width)
    H  attention heads
    C  width of one attention head
    F  hidden width of an expert
    P  packed up and gate rows (2 * F, or F for an activation without a gate)
    V  vocabulary
    E  experts
    L  experts of this rank
    K  choices per token
    N  token copies (T * K)
    R  rows received by the experts
    G  groups of rows that share one matrix
    X  input width of a matmul
    Y  output width of a matmul
    Z  bytes of one row that travels as bytes
"""

from lightning_moe.ops.activations import activation_function, gpt_oss_swiglu, relu2, swiglu
from lightning_moe.ops.attention import AttentionMask, sdpa_attention
from lightning_moe.ops.bias import updated_score_bias
from lightning_moe.ops.cross_entropy import ChunkedLoss, chunked_cross_entropy
from lightning_moe.ops.expert_backend import (
    ExpertBackend,
    ExpertSizes,
    ExpertWeights,
    MatmulBackend,
)
from lightning_moe.ops.grouped_mm import loop_grouped_mm, torch_grouped_mm
from lightning_moe.ops.load import (
    balance_inner_product,
    dead_share,
    drop_rate,
    entropy_imbalance,
    load_entropy,
    load_max_over_mean,
    load_variation,
    max_violation,
    of_layers,
    rank_loads,
    relative_load,
)
from lightning_moe.ops.losses import balance_loss, orthogonality_loss, router_z_loss, z_loss
from lightning_moe.ops.permute import Plan, combine, dot_of_rows, permute, plan_by_expert, reorder
from lightning_moe.ops.records import Routing, TokenRoutes
from lightning_moe.ops.rope import apply_rope, rope_angles
from lightning_moe.ops.top_experts import top_experts

__all__ = [
    "AttentionMask",
    "ChunkedLoss",
    "ExpertBackend",
    "ExpertSizes",
    "ExpertWeights",
    "MatmulBackend",
    "Plan",
    "Routing",
    "TokenRoutes",
    "activation_function",
    "apply_rope",
    "balance_inner_product",
    "balance_loss",
    "chunked_cross_entropy",
    "combine",
    "dead_share",
    "dot_of_rows",
    "drop_rate",
    "entropy_imbalance",
    "gpt_oss_swiglu",
    "load_entropy",
    "load_max_over_mean",
    "load_variation",
    "loop_grouped_mm",
    "max_violation",
    "of_layers",
    "orthogonality_loss",
    "permute",
    "plan_by_expert",
    "rank_loads",
    "relative_load",
    "relu2",
    "reorder",
    "rope_angles",
    "router_z_loss",
    "sdpa_attention",
    "swiglu",
    "top_experts",
    "torch_grouped_mm",
    "updated_score_bias",
    "z_loss",
]
