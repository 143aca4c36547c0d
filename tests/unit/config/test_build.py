"""Configs are built from plain mappings, and turned back, without loss."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from lightning_moe.config import (
    PRESETS,
    AttentionConfig,
    LayerConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    TransformerConfig,
    from_mapping,
    to_mapping,
)
from tests.unit.config.strategies import transformers

SIZES = {"vocab_size": 11, "d_model": 16, "num_layers": 4}


def test_nested_mappings_become_nested_configs() -> None:
    config = from_mapping(
        TransformerConfig,
        {
            **SIZES,
            "attention": {"num_heads": 2, "rope_theta": None},
            "moe": {"num_experts": 5, "router": {"top_k": 3, "lb_loss_weight": 1}, "latent": None},
            "window_pattern": [None, 7],
        },
    )
    assert config == TransformerConfig(
        vocab_size=11,
        d_model=16,
        num_layers=4,
        attention=AttentionConfig(num_heads=2, rope_theta=None),
        moe=MoEConfig(num_experts=5, router=RouterConfig(top_k=3, lb_loss_weight=1.0)),
        window_pattern=(None, 7),
    )


def test_an_integer_becomes_a_float_where_one_is_due() -> None:
    config = from_mapping(OptimConfig, {"lr": 1, "betas": [0, 0.5]}, "optim")
    assert [type(number) for number in (config.lr, *config.betas)] == [float, float, float]


@pytest.mark.parametrize("layer", [2, "2"])
def test_layers_are_named_by_number_or_text(layer: int | str) -> None:
    overrides = {layer: {"dense_hidden_size": 9}}
    config = from_mapping(
        TransformerConfig, {**SIZES, "dense_hidden_size": 7, "layer_overrides": overrides}
    )
    assert dict(config.layer_overrides) == {2: LayerConfig(dense_hidden_size=9)}


MOE = {"num_experts": 5, "router": {"top_k": 3, "bias_gamma": 0.5, "lb_loss_weight": 0.25}}


def test_a_layer_inherits_what_its_override_does_not_name() -> None:
    overrides = {"1": {"moe": {"router": {"bias_gamma": 0.01, "lb_loss_weight": None}}}}
    config = from_mapping(TransformerConfig, {**SIZES, "layer_overrides": overrides, "moe": MOE})
    assert config.layers[1].feed_forward == MoEConfig(
        num_experts=5, router=RouterConfig(top_k=3, bias_gamma=0.01, lb_loss_weight=None)
    )
    assert config.layers[2].feed_forward == MoEConfig(
        num_experts=5, router=RouterConfig(top_k=3, bias_gamma=0.5, lb_loss_weight=0.25)
    )


def test_a_layer_inherits_from_a_section_that_is_built_already() -> None:
    moe = MoEConfig(num_experts=5, router=RouterConfig(top_k=3, bias_gamma=0.5))
    overrides = {1: {"moe": {"num_experts": 7}}, 2: {"moe": MoEConfig(num_experts=9)}}
    config = from_mapping(TransformerConfig, {**SIZES, "moe": moe, "layer_overrides": overrides})
    router = RouterConfig(top_k=3, bias_gamma=0.5)
    assert config.layers[1].feed_forward == MoEConfig(num_experts=7, router=router)
    assert config.layers[2].feed_forward == MoEConfig(num_experts=9)


def test_a_layer_inherits_attention_and_its_own_window() -> None:
    options = {
        **SIZES,
        "dense_hidden_size": 7,
        "attention": {"num_heads": 2, "qk_norm": "head"},
        "window_pattern": [None, 5, 6],
        "layer_overrides": {
            "1": {"attention": {"num_heads": 4}},
            2: {"attention": {"sliding_window": None}},
        },
    }
    layers = from_mapping(TransformerConfig, options).layers
    assert layers[1].attention == AttentionConfig(num_heads=4, qk_norm="head", sliding_window=5)
    assert layers[2].attention == AttentionConfig(num_heads=2, qk_norm="head")


def test_an_error_in_what_a_layer_inherits_names_the_section_of_the_model() -> None:
    overrides = {1: {"moe": {"num_experts": 7}}}
    options = {**SIZES, "layer_overrides": overrides, "moe": {"router": {"topk": 3}}}
    with pytest.raises(ValueError, match=r"^model\.moe\.router\.topk is not an option"):
        from_mapping(TransformerConfig, options)


def test_built_sections_are_taken_as_they_are() -> None:
    moe = MoEConfig(num_experts=5)
    assert from_mapping(TransformerConfig, {**SIZES, "moe": moe}).moe is moe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_modle": 16}, "model.d_modle is not an option; did you mean model.d_model?"),
        (
            {"moe": {"router": {"topk": 2}}},
            "model.moe.router.topk is not an option; did you mean model.moe.router.top_k?",
        ),
        (
            {"moe": {"latent": {"qqq": 1}}},
            "qqq is not an option; choose from latent_dim, bias, nor",
        ),
        ({"moe": {"latent": {}}}, "model.moe.latent.latent_dim is required; set it"),
        ({3: 16}, "model.3 is not an option; choose from vocab_size"),
        (
            {"layer_overrides": {1: {"moe": {"expert": 3}}}},
            "model.layer_overrides[1].moe.expert is not an option; did you mean",
        ),
        (
            {"layer_overrides": {1: {}, "1": {}}},
            "model.layer_overrides[1] is given twice, as a number and as text; keep one",
        ),
    ],
)
def test_an_option_that_does_not_exist_is_refused_by_its_full_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(TransformerConfig, {**SIZES, "dense_hidden_size": 7, **options})


def test_a_missing_option_is_named_in_full() -> None:
    with pytest.raises(ValueError, match=re.escape("model.d_model is required; set it")):
        from_mapping(TransformerConfig, {"vocab_size": 11, "num_layers": 4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe": 3}, "model.moe=3 must be a mapping of options"),
        ({"attention": None}, "model.attention=None must be a mapping of options"),
        ({"window_pattern": "7"}, "model.window_pattern='7' must be of type tuple, got str"),
        ({"d_model": True}, "model.d_model=True must be an integer, got bool"),
        ({"norm_eps": True}, "model.norm_eps=True must be a number, got bool"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_full_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        from_mapping(TransformerConfig, {**SIZES, "dense_hidden_size": 7, **options})


def test_an_error_inside_an_override_says_which_layer() -> None:
    overrides = {"layer_overrides": {3: {"moe": {"router": {"top_k": 0}}}}}
    with pytest.raises(ValueError, match=re.escape("model.moe.router.top_k=0")) as error:
        from_mapping(TransformerConfig, {**SIZES, "dense_hidden_size": 7, **overrides})
    assert error.value.__notes__ == ["while building model.layer_overrides[3].moe.router"]


@settings(max_examples=30, deadline=None)
@given(transformers())
def test_any_transformer_round_trips_through_plain_values(config: TransformerConfig) -> None:
    assert from_mapping(TransformerConfig, to_mapping(config)) == config


@settings(max_examples=10, deadline=None)
@given(transformers())
def test_any_transformer_round_trips_through_text(config: TransformerConfig) -> None:
    text = json.dumps(to_mapping(config))
    assert from_mapping(TransformerConfig, json.loads(text)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips(name: str) -> None:
    config = TransformerConfig.preset(name)
    assert from_mapping(TransformerConfig, to_mapping(config)) == config


def test_an_optimizer_round_trips() -> None:
    config = OptimConfig(schedule="wsd", decay=3, betas=(0.8, 0.99))
    plain = to_mapping(config)
    assert plain["betas"] == [0.8, 0.99]
    assert from_mapping(OptimConfig, plain, "optim") == config


@dataclass(frozen=True)
class Opaque:
    value: object


@pytest.mark.parametrize("config", [3, OptimConfig, Opaque(value={1, 2})])
def test_what_is_not_a_plain_config_is_not_turned_into_a_mapping(config: object) -> None:
    with pytest.raises(TypeError, match="needs a config dataclass"):
        to_mapping(config)


def test_configs_import_neither_torch_nor_lightning() -> None:
    # The package's own __init__ may import torch; the config layer must not need it.
    script = (
        "import sys, types; package = types.ModuleType('lightning_moe'); "
        "package.__path__ = ['lightning_moe']; sys.modules['lightning_moe'] = package; "
        "import lightning_moe.config; "
        "assert not {'torch', 'lightning', 'hydra', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
