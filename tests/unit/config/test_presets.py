"""Presets print the published digits."""

import re

import pytest

from lightning_moe.config import PRESETS, AttentionConfig, TransformerConfig


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [
        ("olmoe3_tiny_64e", "1.59B", "12.91B"),
        ("olmoe3_small_64e", "4.29B", "40.86B"),
        ("olmoe3_medium_64e", "7.37B", "70.22B"),
        ("olmoe3_medium_96e", "7.38B", "103.75B"),
        ("olmoe3_medium_128e", "7.38B", "137.27B"),
        ("olmoe3_large_128e", "15.14B", "295.99B"),
        ("olmoe3_8l_64e", "3.17B", "24.31B"),
    ],
)
def test_billions_of_an_olmoe3_model_are_the_published_ones(
    name: str, active: str, total: str
) -> None:
    config = TransformerConfig.preset(name)
    assert f"{config.num_active_params / 1e9:.2f}B" == active
    assert f"{config.num_params / 1e9:.2f}B" == total


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [("olmoe3_ultra_128e", "58.36B", "1.200T"), ("olmoe3_ultra_256e", "58.41B", "2.380T")],
)
def test_trillions_of_an_olmoe3_ultra_model_are_the_published_ones(
    name: str, active: str, total: str
) -> None:
    config = TransformerConfig.preset(name)
    assert f"{config.num_active_params / 1e9:.2f}B" == active
    assert f"{config.num_params / 1e12:.3f}T" == total


@pytest.mark.parametrize(("num_experts", "total"), [(8, "4.6B"), (48, "18.7B"), (128, "46.9B")])
def test_the_capacity_sweep_grows_in_total_only(num_experts: int, total: str) -> None:
    config = TransformerConfig.preset(f"olmoe3_8l_{num_experts}e")
    assert f"{config.num_params / 1e9:.1f}B" == total
    assert f"{config.num_active_params / 1e9:.1f}B" == "3.2B"


def test_olmoe_has_the_published_counts() -> None:
    config = TransformerConfig.preset("olmoe_1b_7b")
    assert f"{config.num_params / 1e9:.1f}B" == "6.9B"
    assert f"{config.num_active_params / 1e9:.1f}B" == "1.3B"


def test_tiny_is_a_byte_model_with_one_dense_and_three_balanced_moe_layers() -> None:
    config = TransformerConfig.preset("tiny")
    attention = 128 * (128 + 64 + 64 + 128) + 2 * 32
    dense = 3 * 384 * 128
    moe = 8 * 128 + (8 + 1) * 3 * 128 * 128
    norms = (2 * 4 + 1) * 128
    assert config.num_params == 2 * 264 * 128 + 4 * attention + dense + 3 * moe + norms
    assert config.moe is not None
    assert config.moe.router.has_score_bias
    assert config.moe.router.lb_loss_weight == 0.01


def test_all_presets_are_there() -> None:
    sizes = ["tiny_64e", "small_64e", "medium_64e", "medium_96e", "medium_128e", "large_128e"]
    sizes += ["ultra_128e", "ultra_256e", "8l_8e", "8l_32e", "8l_48e", "8l_64e", "8l_128e"]
    assert set(PRESETS) == {"tiny", "olmoe_1b_7b", *(f"olmoe3_{size}" for size in sizes)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_asks_for_a_balanced_load(name: str) -> None:
    moe = TransformerConfig.preset(name).moe
    assert moe is not None
    assert moe.router.lb_loss_weight is not None
    assert moe.router.lb_loss_weight > 0


def test_an_override_replaces_one_field_of_a_preset() -> None:
    config = TransformerConfig.preset("tiny", num_layers=2, attention={"num_heads": 8})
    assert config.num_layers == 2
    assert config.attention == AttentionConfig(num_heads=8)
    assert config.moe == TransformerConfig.preset("tiny").moe


def test_an_unknown_preset_lists_the_known_ones() -> None:
    message = "model preset 'tinny' does not exist; did you mean 'tiny'? choose from tiny, olmoe_1b"
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig.preset("tinny")


def test_an_unknown_override_of_a_preset_is_refused() -> None:
    message = "model.num_layer is not an option; did you mean model.num_layers?"
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig.preset("tiny", num_layer=2)
