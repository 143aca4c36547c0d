"""Random small configs for property tests."""

from typing import get_args

from hypothesis import strategies as st

from lightning_moe.config import (
    AttentionConfig,
    BalanceScope,
    LatentMoEConfig,
    LatentNorm,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)

WEIGHTS = st.none() | st.floats(0, 1)


@st.composite
def routers(draw: st.DrawFn, *, num_experts: int) -> RouterConfig:
    """A router for `num_experts` experts."""
    bias_gamma = draw(st.sampled_from([None, 1e-3]))
    scope = draw(st.sampled_from(get_args(BalanceScope)))
    weight = 0.1 if scope == "exact" else draw(WEIGHTS)
    return RouterConfig(
        top_k=draw(st.integers(1, num_experts)),
        bias=draw(st.booleans()),
        jitter_eps=draw(st.none() | st.floats(0, 0.5)),
        gating_function=draw(st.sampled_from(["softmax", "topk_softmax", "sigmoid"])),
        normalize_expert_weights=draw(st.sampled_from([None, 1.0, 2.0])),
        restore_weight_scale=draw(st.booleans()),
        bias_gamma=bias_gamma,
        bias_centering=draw(st.booleans()) if bias_gamma else False,
        score_correction_bias=draw(st.booleans()),
        lb_loss_weight=weight,
        lb_loss_scope=scope,
        lb_loss_over_layers=draw(st.sampled_from(["sum", "mean"])),
        z_loss_weight=draw(WEIGHTS),
    )


@st.composite
def moes(draw: st.DrawFn, *, d_model: int) -> MoEConfig:
    """An MoE layer for model width `d_model`."""
    num_experts = draw(st.integers(1, 5))
    norm = draw(st.sampled_from([None, *get_args(LatentNorm)]))
    latent = st.builds(
        LatentMoEConfig,
        latent_dim=st.integers(1, d_model - 1),
        bias=st.booleans(),
        norm=st.just(norm),
        norm_eps=st.none() | st.floats(1e-8, 1) if norm else st.none(),
        norm_bias=st.booleans() if norm else st.just(False),
    )
    shared = st.builds(
        SharedExpertConfig,
        hidden_size=st.integers(1, 9),
        activation=st.sampled_from(["swiglu", "relu2"]),
    )
    activation = draw(st.sampled_from(["swiglu", "relu2", "gpt_oss_swiglu"]))
    limit = draw(st.sampled_from([None, 7.0])) if activation == "gpt_oss_swiglu" else None
    return MoEConfig(
        num_experts=num_experts,
        hidden_size=draw(st.integers(1, 9)),
        router=draw(routers(num_experts=num_experts)),
        latent=draw(st.none() | latent),
        shared=draw(st.none() | shared),
        activation=activation,
        activation_limit=limit,
        expert_bias=draw(st.booleans()),
    )


@st.composite
def attentions(draw: st.DrawFn, *, windowed: bool) -> AttentionConfig:
    """An attention that works in any even model width."""
    num_kv_heads = draw(st.integers(1, 2))
    return AttentionConfig(
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        rope_theta=draw(st.sampled_from([None, 10_000.0])),
        sliding_window=draw(st.none() | st.integers(1, 9)) if windowed else None,
        bias=draw(st.booleans()),
    )


@st.composite
def layer_configs(draw: st.DrawFn, *, d_model: int) -> LayerConfig:
    """What one layer does differently."""
    kind = draw(st.sampled_from(["same", "moe", "dense"]))
    return LayerConfig(
        attention=draw(st.none() | attentions(windowed=True)),
        moe=draw(moes(d_model=d_model)) if kind == "moe" else None,
        dense_hidden_size=draw(st.integers(1, 9)) if kind == "dense" else None,
    )


@st.composite
def transformers(draw: st.DrawFn) -> TransformerConfig:
    """A transformer of up to four layers of every kind."""
    d_model = draw(st.sampled_from([6, 8, 10]))
    num_layers = draw(st.integers(1, 4))
    windows = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    window_pattern = draw(st.none() | windows)
    overrides = st.dictionaries(
        st.integers(0, num_layers - 1), layer_configs(d_model=d_model), max_size=2
    )
    return TransformerConfig(
        vocab_size=draw(st.integers(1, 13)),
        d_model=d_model,
        num_layers=num_layers,
        attention=draw(attentions(windowed=window_pattern is None)),
        moe=draw(st.none() | moes(d_model=d_model)),
        dense_hidden_size=draw(st.integers(1, 9)),
        num_dense_layers=draw(st.integers(0, num_layers)),
        layer_overrides=draw(overrides),
        window_pattern=window_pattern,
        norm_placement=draw(st.sampled_from(["pre", "post", "peri"])),
        scale_embedding=draw(st.booleans()),
        norm_embedding=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        lm_z_loss_weight=draw(WEIGHTS),
    )
