"""Parameters and FLOPs, counted by hand."""

import re

import pytest

from lightning_moe.config import (
    AttentionConfig,
    LatentMoEConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.config.counting import causal_pairs


def layer(moe: MoEConfig | None = None, **options: object) -> TransformerConfig:
    """One layer of width 6; dense of hidden size 7 without `moe`."""
    sizes = {"vocab_size": 11, "d_model": 6, "num_layers": 1, "dense_hidden_size": 7}
    attention = AttentionConfig(num_heads=3)
    return TransformerConfig(**{**sizes, "attention": attention, "moe": moe, **options})


# Embedding and head, attention of four 6 x 6 matrices, dense of three 7 x 6, three norms.
PLAIN = 2 * 11 * 6 + 4 * 6 * 6 + 3 * 7 * 6 + 3 * 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PLAIN),
        ({"norm_placement": "post"}, PLAIN),
        ({"norm_placement": "peri"}, PLAIN + 2 * 6),
        ({"norm_embedding": True, "scale_embedding": True}, PLAIN + 6),
        ({"tie_embeddings": True}, PLAIN - 11 * 6),
        ({"num_layers": 2}, PLAIN + 4 * 6 * 6 + 3 * 7 * 6 + 2 * 6),
        ({"attention": AttentionConfig(num_heads=3, qk_norm="head")}, PLAIN + 2 * 2),
        ({"attention": AttentionConfig(num_heads=3, qk_norm="full")}, PLAIN + 2 * 6),
        ({"attention": AttentionConfig(num_heads=3, bias=True)}, PLAIN + 4 * 6),
        # Heads of width 4: queries and output 12 wide, keys and values 4 wide.
        (
            {"attention": AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=4)},
            PLAIN - 4 * 6 * 6 + (12 + 12 + 4 + 4) * 6,
        ),
        (
            {
                "attention": AttentionConfig(
                    num_heads=3, num_kv_heads=1, head_dim=4, bias=True, qk_norm="full"
                )
            },
            PLAIN - 4 * 6 * 6 + (12 + 12 + 4 + 4) * 6 + (12 + 4 + 4 + 6) + (12 + 4),
        ),
    ],
)
def test_a_dense_model_has_the_parameters_counted_by_hand(
    options: dict[str, object], expected: int
) -> None:
    config = layer(**options)
    assert config.num_params == config.num_active_params == expected


REST = PLAIN - 3 * 7 * 6
TOP2 = RouterConfig(top_k=2)


@pytest.mark.parametrize(
    ("options", "always", "per_expert"),
    [
        ({}, 5 * 6, 3 * 4 * 6),
        ({"activation": "relu2"}, 5 * 6, 2 * 4 * 6),
        ({"activation": "gpt_oss_swiglu"}, 5 * 6, 3 * 4 * 6),
        ({"expert_bias": True}, 5 * 6, 3 * 4 * 6 + 2 * 4 + 6),
        ({"activation": "relu2", "expert_bias": True}, 5 * 6, 2 * 4 * 6 + 4 + 6),
        ({"router": RouterConfig(top_k=2, bias=True)}, 5 * 6 + 5, 3 * 4 * 6),
        ({"router": RouterConfig(top_k=2, bias_gamma=1e-3)}, 5 * 6, 3 * 4 * 6),
        ({"shared": SharedExpertConfig(hidden_size=9)}, 5 * 6 + 3 * 9 * 6, 3 * 4 * 6),
        (
            {"shared": SharedExpertConfig(hidden_size=9, activation="relu2")},
            5 * 6 + 2 * 9 * 6,
            3 * 4 * 6,
        ),
        ({"latent": LatentMoEConfig(latent_dim=3)}, 5 * 6 + 2 * 3 * 6, 3 * 4 * 3),
        (
            {"latent": LatentMoEConfig(latent_dim=3, bias=True, norm="rms"), "expert_bias": True},
            5 * 6 + 2 * 3 * 6 + (3 + 6) + 3,
            3 * 4 * 3 + 2 * 4 + 3,
        ),
        (
            {"latent": LatentMoEConfig(latent_dim=3, norm="layer", norm_bias=True)},
            5 * 6 + 2 * 3 * 6 + 3 + 3,
            3 * 4 * 3,
        ),
    ],
)
def test_an_moe_layer_has_the_parameters_counted_by_hand(
    options: dict[str, object], always: int, per_expert: int
) -> None:
    moe = MoEConfig(**{"num_experts": 5, "hidden_size": 4, "router": TOP2, **options})
    config = layer(moe)
    assert config.num_params == REST + always + 5 * per_expert
    assert config.num_active_params == REST + always + 2 * per_expert


def test_each_layer_counts_what_its_override_makes_of_it() -> None:
    moe = MoEConfig(num_experts=5, hidden_size=4, router=TOP2)
    config = layer(moe, num_layers=2, layer_overrides={1: LayerConfig(dense_hidden_size=8)})
    second = 4 * 6 * 6 + 3 * 8 * 6 + 2 * 6
    assert config.num_params == REST + 5 * 6 + 5 * 3 * 4 * 6 + second


@pytest.mark.parametrize(
    ("seq_len", "window", "expected"),
    [
        (1, None, 1),
        (5, None, 1 + 2 + 3 + 4 + 5),
        (5, 1, 5),
        (5, 2, 1 + 2 + 2 + 2 + 2),
        (5, 3, 1 + 2 + 3 + 3 + 3),
        (5, 5, 15),
        (5, 9, 15),
    ],
)
def test_causal_pairs_are_counted_exactly(seq_len: int, window: int | None, expected: int) -> None:
    assert causal_pairs(seq_len, window) == expected


def two_layers(num_experts: int, **moe: object) -> TransformerConfig:
    """Two MoE layers of width 64 with a vocabulary of 1000, four heads of width 16."""
    options = {"hidden_size": 128, "router": TOP2, **moe}
    return TransformerConfig(
        vocab_size=1000,
        d_model=64,
        num_layers=2,
        moe=MoEConfig(num_experts=num_experts, **options),
    )


# 32 positions see (1 + 32) / 2 tokens on average.
ATTENTION = 2 * (6 * 4 * 64 * 64 + 12 * 64 * 33 // 2)
HEAD = 6 * 1000 * 64


def test_flops_of_an_moe_model_are_those_of_its_active_matrices() -> None:
    router, routed = 6144, 589_824
    assert router == 6 * 64 * 8 * 2
    assert routed == 6 * 2 * 3 * 64 * 128 * 2
    assert two_layers(8).flops_per_token(32) == router + routed + ATTENTION + HEAD


def test_more_experts_cost_only_a_wider_router() -> None:
    assert two_layers(24).flops_per_token(32) - two_layers(8).flops_per_token(32) == 6 * 64 * 16 * 2


def test_relu2_experts_cost_two_thirds_of_gated_ones() -> None:
    gated, relu2 = two_layers(8), two_layers(8, activation="relu2")
    assert gated.flops_per_token(32) - relu2.flops_per_token(32) == 589_824 // 3


def test_a_shared_expert_costs_its_own_width() -> None:
    shared = two_layers(8, shared=SharedExpertConfig(hidden_size=40))
    assert shared.flops_per_token(32) - two_layers(8).flops_per_token(32) == 18 * 64 * 40 * 2


def test_latent_experts_cost_two_projections_and_their_narrow_width() -> None:
    flops = two_layers(8, latent=LatentMoEConfig(latent_dim=16, bias=True)).flops_per_token(32)
    assert flops == 6144 + 589_824 // 4 + 2 * 6 * 2 * 64 * 16 + ATTENTION + HEAD


def test_a_tied_head_costs_as_much_as_its_own() -> None:
    tied = layer(tie_embeddings=True)
    assert tied.flops_per_token(5) == layer().flops_per_token(5)


def test_norms_and_biases_cost_nothing() -> None:
    plain = AttentionConfig(num_heads=3)
    rich = AttentionConfig(num_heads=3, bias=True, qk_norm="full")
    config = layer(attention=rich, norm_placement="peri", norm_embedding=True)
    assert config.flops_per_token(5) == layer(attention=plain).flops_per_token(5)


def test_a_window_lowers_only_the_attention_of_its_layers() -> None:
    full = layer(num_layers=2)
    windowed = layer(num_layers=2, window_pattern=(None, 2))
    # Five positions see 15 tokens without and 9 with the window; three heads of width 2.
    assert full.flops_per_token(5) - windowed.flops_per_token(5) == round(12 * 6 * 30 / 5) - round(
        12 * 6 * 24 / 5
    )


def test_the_average_of_pairs_is_rounded_once() -> None:
    # 12 * 6 * 9 / 5 = 129.6 per layer: three layers give 388.8, not three times 130.
    config = layer(num_layers=3, attention=AttentionConfig(num_heads=3, sliding_window=2))
    matrices = 6 * (11 * 6 + 3 * (4 * 6 * 6 + 3 * 7 * 6))
    assert config.flops_per_token(5) == matrices + 389


@pytest.mark.parametrize("seq_len", [0, -3])
def test_flops_of_an_empty_sequence_are_refused(seq_len: int) -> None:
    message = f"flops_per_token.seq_len={seq_len} must be at least 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer().flops_per_token(seq_len)
