"""Integer arithmetic of parameters and FLOPs; equals what the modules of `lightning_moe.nn` own."""

from collections.abc import Sequence
from typing import Final, Literal

from lightning_moe.config.layers import AttentionConfig, DenseConfig, LayerSpec
from lightning_moe.config.moe import MoEConfig

NormPlacement = Literal["pre", "post", "peri"]

_FLOPS_PER_WEIGHT: Final = 6
"""Per token and matmul weight: multiply and add, once forward and twice backward."""

_FLOPS_PER_PAIR: Final = 12
"""Per query-key pair and head channel: the same for the two products, scores and values."""


def norm_params(d_model: int, placement: NormPlacement) -> int:
    """Parameters of the RMS norms around attention and feed-forward of one block."""
    return d_model * (4 if placement == "peri" else 2)


def attention_matmul_params(attention: AttentionConfig, d_model: int) -> int:
    """Parameters of the four projection matrices."""
    heads = 2 * attention.num_heads + 2 * attention.kv_heads
    return heads * attention.head_width(d_model) * d_model


def attention_params(attention: AttentionConfig, d_model: int) -> int:
    """Parameters of one attention: projections, their biases and the query/key norms."""
    head_width = attention.head_width(d_model)
    query_and_kv_width = (attention.num_heads + attention.kv_heads) * head_width
    total = attention_matmul_params(attention, d_model)
    if attention.bias:
        total += query_and_kv_width + attention.kv_heads * head_width + d_model
    if attention.qk_norm == "head":
        total += 2 * head_width
    elif attention.qk_norm == "full":
        total += query_and_kv_width
    return total


def num_matrices(activation: str) -> int:
    """Matrices of an expert, all of hidden size times width: gated ones have three, relu2 two."""
    return 2 if activation == "relu2" else 3


def expert_width(moe: MoEConfig, d_model: int) -> int:
    """Width of the routed experts' input and output."""
    return d_model if moe.latent is None else moe.latent.latent_dim


def expert_params(moe: MoEConfig, d_model: int) -> int:
    """Parameters of one routed expert, with its biases."""
    width = expert_width(moe, d_model)
    matrices = num_matrices(moe.activation)
    bias = (matrices - 1) * moe.hidden_size + width if moe.expert_bias else 0
    return matrices * moe.hidden_size * width + bias


def always_active_matmul_params(moe: MoEConfig, d_model: int) -> int:
    """Parameters of the matrices every token passes: router, latent projections, shared expert."""
    total = moe.num_experts * d_model
    if moe.latent is not None:
        total += 2 * moe.latent.latent_dim * d_model
    if moe.shared is not None:
        total += num_matrices(moe.shared.activation) * moe.shared.hidden_size * d_model
    return total


def moe_params(moe: MoEConfig, d_model: int, *, experts: int) -> int:
    """Parameters of an MoE layer of which `experts` routed experts count.

    The expert bias is a buffer and not counted.
    """
    total = always_active_matmul_params(moe, d_model) + experts * expert_params(moe, d_model)
    if moe.router.bias:
        total += moe.num_experts
    if moe.latent is not None and moe.latent.bias:
        total += moe.latent.latent_dim + d_model
    if moe.latent is not None and moe.latent.norm is not None:
        total += moe.latent.latent_dim * (2 if moe.latent.norm_bias else 1)
    return total


def dense_params(dense: DenseConfig, d_model: int) -> int:
    """Parameters of a dense feed-forward part."""
    return num_matrices(dense.activation) * dense.hidden_size * d_model


def layer_params(
    layer: LayerSpec, d_model: int, *, placement: NormPlacement, active_only: bool
) -> int:
    """Parameters of one block; `active_only` counts `top_k` of its routed experts."""
    total = attention_params(layer.attention, d_model) + norm_params(d_model, placement)
    moe = layer.feed_forward
    if isinstance(moe, DenseConfig):
        return total + dense_params(moe, d_model)
    return total + moe_params(
        moe, d_model, experts=moe.router.top_k if active_only else moe.num_experts
    )


def causal_pairs(seq_len: int, window: int | None) -> int:
    """Query-key pairs of one sequence: the sum over positions p of min(p + 1, window)."""
    reach = seq_len if window is None else min(window, seq_len)
    return reach * (reach + 1) // 2 + (seq_len - reach) * reach


def layer_matmul_params_per_token(layer: LayerSpec, d_model: int) -> int:
    """Parameters of the matrices that one token is multiplied with in one block."""
    total = attention_matmul_params(layer.attention, d_model)
    moe = layer.feed_forward
    if isinstance(moe, DenseConfig):
        return total + dense_params(moe, d_model)
    routed = num_matrices(moe.activation) * moe.hidden_size * expert_width(moe, d_model)
    return total + always_active_matmul_params(moe, d_model) + moe.router.top_k * routed


def flops_per_token(
    layers: Sequence[LayerSpec], *, d_model: int, vocab_size: int, seq_len: int
) -> int:
    """Floating-point operations per token, forward and backward, at sequence length `seq_len`.

    Attention counts exactly the query-key pairs that causality and window allow, averaged over the
    positions and rounded once. Not included: embedding lookup, norms, activations, softmax, biases,
    losses, dispatch, recomputation.
    """
    weights = vocab_size * d_model
    pair_channels = 0
    for layer in layers:
        weights += layer_matmul_params_per_token(layer, d_model)
        attention_width = layer.attention.num_heads * layer.attention.head_width(d_model)
        pair_channels += attention_width * causal_pairs(seq_len, layer.attention.sliding_window)
    attention = (_FLOPS_PER_PAIR * pair_channels + seq_len // 2) // seq_len
    return _FLOPS_PER_WEIGHT * weights + attention
