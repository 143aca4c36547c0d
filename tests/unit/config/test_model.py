"""TransformerConfig resolves its layers and refuses what cannot work."""

import copy
import pickle
import re

import pytest

from lightning_moe.config import (
    AttentionConfig,
    DenseConfig,
    LatentMoEConfig,
    LayerConfig,
    LayerSpec,
    MoEConfig,
    TransformerConfig,
)

MOE = MoEConfig(num_experts=3, hidden_size=5)


def model(**options: object) -> TransformerConfig:
    sizes = {"vocab_size": 11, "d_model": 16, "num_layers": 4, "moe": MOE}
    return TransformerConfig(**{**sizes, **options})


def test_the_first_layers_are_dense_and_the_rest_moe() -> None:
    layers = model(num_dense_layers=1, dense_hidden_size=7, num_layers=3).layers
    assert [layer.feed_forward for layer in layers] == [DenseConfig(hidden_size=7), MOE, MOE]


def test_without_moe_all_layers_are_dense() -> None:
    layers = model(moe=None, dense_hidden_size=7, num_layers=2).layers
    assert (
        layers
        == (LayerSpec(attention=AttentionConfig(), feed_forward=DenseConfig(hidden_size=7)),) * 2
    )


def test_windows_are_cycled_over_the_layers() -> None:
    layers = model(window_pattern=(None, 6, 8)).layers
    assert [layer.attention.sliding_window for layer in layers] == [None, 6, 8, None]


def test_an_override_replaces_only_what_it_names() -> None:
    own_moe = MoEConfig(num_experts=2)
    own_attention = AttentionConfig(num_heads=8)
    layers = model(
        layer_overrides={
            1: LayerConfig(moe=own_moe),
            2: LayerConfig(dense_hidden_size=9),
            3: LayerConfig(attention=own_attention),
        }
    ).layers
    assert [layer.feed_forward for layer in layers] == [
        MOE,
        own_moe,
        DenseConfig(hidden_size=9),
        MOE,
    ]
    assert [layer.attention.num_heads for layer in layers] == [4, 4, 4, 8]


def test_an_overridden_attention_brings_its_own_window() -> None:
    layers = model(
        window_pattern=(6,), layer_overrides={2: LayerConfig(attention=AttentionConfig())}
    ).layers
    assert [layer.attention.sliding_window for layer in layers] == [6, 6, None, 6]


def test_changing_the_dict_of_overrides_later_does_not_change_the_config() -> None:
    overrides = {1: LayerConfig(dense_hidden_size=9)}
    config = model(layer_overrides=overrides)
    overrides.clear()
    assert dict(config.layer_overrides) == {1: LayerConfig(dense_hidden_size=9)}


def test_equal_configs_have_equal_hashes() -> None:
    overrides = {1: LayerConfig(dense_hidden_size=9), 2: LayerConfig(moe=MOE)}
    turned = dict(reversed(overrides.items()))
    assert model(layer_overrides=overrides) == model(layer_overrides=turned)
    assert hash(model(layer_overrides=overrides)) == hash(model(layer_overrides=turned))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_config_survives_copying_and_pickling(duplicate: type[TransformerConfig]) -> None:
    config = model(layer_overrides={1: LayerConfig(dense_hidden_size=9)}, window_pattern=(None, 3))
    assert duplicate(config) == config


def test_key_value_heads_and_head_width_have_defaults() -> None:
    attention = AttentionConfig(num_heads=6)
    assert (attention.kv_heads, attention.head_width(24)) == (6, 4)
    attention = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10)
    assert (attention.kv_heads, attention.head_width(24)) == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "model.attention.num_heads=0 must be at least 1"),
        ({"sliding_window": 0}, "model.attention.sliding_window=0 must be at least 1"),
        ({"qk_norm": "layer"}, "model.attention.qk_norm='layer' must be one of head, full"),
        ({"rope_theta": 0.0}, "model.attention.rope_theta=0.0 must be finite and greater than 0"),
        ({"backend": "flash"}, "model.attention.backend='flash' must be one of sdpa"),
        (
            {"num_heads": 6, "num_kv_heads": 4},
            "model.attention.num_heads=6 is not a multiple of model.attention.num_kv_heads=4; "
            "choose a divisor of 6 for num_kv_heads",
        ),
    ],
)
def test_an_attention_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "model.vocab_size=0 must be at least 1"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"num_dense_layers": -1}, "model.num_dense_layers=-1 must be at least 0"),
        ({"dense_hidden_size": 0}, "model.dense_hidden_size=0 must be at least 1"),
        (
            {"num_dense_layers": 5},
            "model.num_dense_layers=5 is more than model.num_layers=4; "
            "choose num_dense_layers in [0, 4]",
        ),
        (
            {"num_dense_layers": 2},
            "model.dense_hidden_size=None, but layer 0 is dense (model.num_dense_layers=2); set",
        ),
        ({"moe": None}, "model.dense_hidden_size=None, but layer 0 is dense (model.moe=None); set"),
        (
            {"norm_placement": "sandwich"},
            "model.norm_placement='sandwich' must be one of pre, post",
        ),
        ({"compile": "yes"}, "model.compile='yes' must be one of none, inductor, aot_eager"),
        ({"recompute": "full"}, "model.recompute='full' must be one of none, block, moe, attent"),
        (
            {"moe": None, "dense_hidden_size": 9, "recompute": "moe"},
            "model.recompute=moe, but no layer has a mixture of experts; choose block or attention",
        ),
        (
            {"layer_overrides": {1: LayerConfig(dense_hidden_size=9, recompute="moe")}},
            "model.layer_overrides[1].recompute=moe, but layer 1 is dense; choose block or attention",
        ),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be finite and greater than 0"),
        ({"init_std": float("nan")}, "model.init_std=nan must be finite"),
        ({"lm_z_loss_weight": -1e-4}, "model.lm_z_loss_weight=-0.0001 must be finite and at least"),
        (
            {"d_model": 18},
            "model.d_model=18 is not a multiple of model.attention.num_heads=4; "
            "choose a divisor of 18 for num_heads, or set model.attention.head_dim",
        ),
        (
            {"d_model": 12},
            "model.attention.head_dim=3 is odd, but rotary positions "
            "(model.attention.rope_theta=500000.0) turn pairs; choose an even head_dim",
        ),
        (
            {"moe": MoEConfig(latent=LatentMoEConfig(latent_dim=16))},
            "model.moe.latent.latent_dim=16 is not smaller than model.d_model=16; choose",
        ),
        ({"window_pattern": ()}, "model.window_pattern=() is empty; unset it or name a window"),
        ({"window_pattern": (None, 0)}, "model.window_pattern[1]=0 must be at least 1"),
        (
            {"window_pattern": (3,), "attention": AttentionConfig(sliding_window=2)},
            "model.attention.sliding_window=2 and model.window_pattern=(3,) both set the windows",
        ),
        (
            {"layer_overrides": {4: LayerConfig()}},
            "model.layer_overrides[4] names a layer that does not exist with model.num_layers=4; "
            "choose from 0 to 3",
        ),
        (
            {"layer_overrides": {1: LayerConfig(attention=AttentionConfig(num_heads=5))}},
            "model.d_model=16 is not a multiple of model.layer_overrides[1].attention.num_heads=5",
        ),
        (
            {
                "layer_overrides": {
                    1: LayerConfig(moe=MoEConfig(latent=LatentMoEConfig(latent_dim=20)))
                }
            },
            "model.layer_overrides[1].moe.latent.latent_dim=20 is not smaller than model.d_model",
        ),
    ],
)
def test_a_model_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 16.0}, "model.d_model=16.0 must be an integer, got float"),
        ({"tie_embeddings": 1}, "model.tie_embeddings=1 must be true or false, got int"),
        ({"attention": None}, "model.attention=None must be of type AttentionConfig, got None"),
        ({"moe": "tiny"}, "model.moe='tiny' must be of type MoEConfig, got str"),
        ({"window_pattern": [3]}, "model.window_pattern=[3] must be of type tuple, got list"),
        ({"layer_overrides": [LayerConfig()]}, "must be of type Mapping, got list"),
        ({"layer_overrides": {"1": LayerConfig()}}, "layer='1' must be an integer, got str"),
        ({"layer_overrides": {1: MOE}}, "must be of type LayerConfig, got MoEConfig"),
    ],
)
def test_a_model_option_of_the_wrong_type_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        model(**options)


def test_recompute_holds_for_every_layer_that_has_the_part_and_no_other_choice() -> None:
    overrides = {2: LayerConfig(recompute="none"), 3: LayerConfig(recompute="block")}
    layers = model(
        num_dense_layers=1, dense_hidden_size=9, recompute="moe", layer_overrides=overrides
    ).layers
    assert [layer.recompute for layer in layers] == ["none", "moe", "none", "block"]


def test_a_layer_recomputes_only_what_there_is() -> None:
    message = (
        "model.layer_overrides[...].recompute='all' must be one of none, block, moe, attention"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        LayerConfig(recompute="all")


def test_a_head_of_odd_width_works_without_positions() -> None:
    assert model(d_model=12, attention=AttentionConfig(rope_theta=None)).d_model == 12


def test_a_layer_cannot_be_both_dense_and_moe() -> None:
    message = "model.layer_overrides[...].dense_hidden_size=9 and model.layer_overrides[...].moe ex"
    with pytest.raises(ValueError, match=re.escape(message)):
        LayerConfig(moe=MOE, dense_hidden_size=9)


def test_a_dense_layer_needs_a_positive_width() -> None:
    with pytest.raises(ValueError, match=re.escape("model.dense.hidden_size=0 must be at least 1")):
        DenseConfig(hidden_size=0)


def test_overrides_are_printed_like_a_dict() -> None:
    overrides = {1: LayerConfig(dense_hidden_size=9)}
    assert repr(model(layer_overrides=overrides).layer_overrides) == repr(overrides)
    assert len(model(layer_overrides=overrides).layer_overrides) == 1
