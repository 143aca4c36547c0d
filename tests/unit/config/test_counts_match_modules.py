"""Counted parameters equal those of the modules."""

import pytest
import torch
from hypothesis import given, settings

from lightning_moe.config import PRESETS, TransformerConfig
from lightning_moe.nn import MoETransformer
from tests.unit.config.strategies import transformers


def module_params(config: TransformerConfig) -> int:
    """Elements of all parameters of the model; a tied weight counts once, buffers not."""
    with torch.device("meta"):
        model = MoETransformer(config)
    return sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=30, deadline=None)
@given(transformers())
def test_any_transformer_has_as_many_parameters_as_its_config_counts(
    config: TransformerConfig,
) -> None:
    assert config.num_params == module_params(config)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_as_many_parameters_as_its_config_counts(name: str) -> None:
    config = TransformerConfig.preset(name)
    assert config.num_params == module_params(config)
