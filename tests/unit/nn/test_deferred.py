"""Weights of experts get their memory when something first reads one of them."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe import MoEConfig, RouterConfig, TransformerConfig
from lightning_moe.nn import MoE, MoETransformer
from tests.kit.memory import LiveBytes

CONFIG = MoEConfig(
    num_experts=8, hidden_size=16, router=RouterConfig(top_k=2), expert_bias=True, backend="torch"
)
X_TD = torch.linspace(-1, 1, 36).view(3, 12)


def _layer() -> MoE:
    torch.manual_seed(0)
    return MoE(12, CONFIG)


def _has_memory(layer: MoE) -> bool:
    # Not through the module: looking is what gives memory.
    return not dict.__getitem__(layer.experts._parameters, "w_down").is_meta


def _weights() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _layer().state_dict().items()}


READERS: dict[str, Callable[[MoE], Any]] = {
    "parameters": lambda layer: list(layer.parameters()),
    "state_dict": lambda layer: layer.state_dict(),
    "an attribute": lambda layer: layer.experts.w_down,
    "a forward": lambda layer: layer(X_TD),
    "a cast": lambda layer: layer.double().float(),
    "loading": lambda layer: layer.load_state_dict(_weights()),
    "functional_call": lambda layer: torch.func.functional_call(layer, _weights(), (X_TD,)),
    "a copied mapping": lambda layer: dict(layer.experts._parameters),
    "assigning one of them": lambda layer: setattr(
        layer.experts, "w_up_gate", nn.Parameter(_weights()["experts.w_up_gate"])
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_a_weight_finds_all_with_memory_and_values(reader: str) -> None:
    layer = _layer()
    assert not _has_memory(layer)
    READERS[reader](layer)
    assert _has_memory(layer)
    assert type(layer.experts._parameters) is dict
    for name, value in layer.state_dict().items():
        assert torch.equal(value, _weights()[name]), name


def test_names_shapes_and_a_printed_model_need_no_memory() -> None:
    layer = _layer()
    assert "w_down" in layer.experts._parameters
    assert "experts=8" in repr(layer)
    layer.experts.keep_(range(2, 4))
    assert not _has_memory(layer)


def test_only_experts_that_are_kept_get_memory() -> None:
    torch.manual_seed(0)
    whole = MoE(12, replace(CONFIG, num_experts=64)).experts.w_down
    torch.manual_seed(0)
    layer = MoE(12, replace(CONFIG, num_experts=64))
    layer.experts.keep_(range(16, 48))
    with LiveBytes() as watch:
        kept = layer.experts.w_down
    assert torch.equal(kept, whole[16:48])
    own = sum(p.numel() * 4 for p in layer.experts.parameters())
    # Values are drawn one expert at a time.
    assert own <= watch.peak <= 1.1 * own


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_deferred_too_and_gets_the_same_values(copied: str) -> None:
    layer = _layer()
    if copied == "deepcopy":
        twin = copy.deepcopy(layer)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert not _has_memory(layer)
    assert not _has_memory(twin)
    assert torch.equal(twin.experts.w_down, layer.experts.w_down)
    assert twin.experts.w_down.data_ptr() != layer.experts.w_down.data_ptr()


def test_weights_that_are_first_read_in_inference_mode_can_be_trained() -> None:
    layer = _layer()
    with torch.inference_mode():
        layer(X_TD)
    layer(X_TD)[0].sum().backward()
    assert layer.experts.w_down.grad is not None


def test_values_do_not_depend_on_when_they_are_read() -> None:
    config = TransformerConfig.preset("tiny")
    torch.manual_seed(0)
    early = MoETransformer(config).state_dict()
    torch.manual_seed(0)
    late = MoETransformer(config)
    torch.randn(100)
    for name, value in late.state_dict().items():
        assert torch.equal(value, early[name]), name
