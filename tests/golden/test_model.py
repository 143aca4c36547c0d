"""A whole model of two layers gives the loss, logits and gradients of Olmo-core 3."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe import nn
from lightning_moe.config import (
    AttentionConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.ops import chunked_cross_entropy
from tests.golden.convert import convert_state, load_golden

NUM_EXPERTS = 8
ROUTER = RouterConfig(
    top_k=2,
    normalize_expert_weights=1.0,
    restore_weight_scale=True,
    lb_loss_weight=0.01,
    z_loss_weight=1e-3,
)
CONFIG = TransformerConfig(
    vocab_size=256,
    d_model=128,
    num_layers=2,
    attention=AttentionConfig(num_heads=4, qk_norm="head", rope_theta=500_000.0),
    moe=MoEConfig(
        num_experts=NUM_EXPERTS,
        hidden_size=64,
        router=ROUTER,
        shared=SharedExpertConfig(hidden_size=64),
    ),
    norm_placement="post",
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return load_golden("model_2layer.pt")


@pytest.fixture(scope="module")
def model(golden: dict[str, Any]) -> nn.MoETransformer:
    """The golden weights, and the gradients of one backward with the golden inputs."""
    model = nn.MoETransformer(CONFIG)
    model.load_state_dict(convert_state(golden["state"], num_experts=NUM_EXPERTS))
    features_BSD, records = model.features(golden["input_ids"])
    cross_entropy = _cross_entropy(model, features_BSD, golden)
    balance, z = (term(records, reduction="sum") for term in (nn.balance_loss, nn.z_loss))
    aux_loss = (ROUTER.lb_loss_weight * balance + ROUTER.z_loss_weight * z) / golden["div"]
    (cross_entropy + aux_loss).backward()
    return model


def _cross_entropy(
    model: nn.MoETransformer, features_BSD: Tensor, golden: dict[str, Any]
) -> Tensor:
    """Their labels are the inputs themselves, not shifted."""
    labels = golden["input_ids"].flatten()
    loss = chunked_cross_entropy(features_BSD.flatten(0, 1), model.head_weight, labels)
    return loss.total / golden["div"]


def assert_equal_to_1e5(actual: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest entry, the rounding of sums through two float32 layers."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)


def test_logits_equal_the_original(model: nn.MoETransformer, golden: dict[str, Any]) -> None:
    with torch.no_grad():
        logits, _ = model(golden["input_ids"])
    assert_equal_to_1e5(logits, golden["logits"])


def test_cross_entropy_equals_the_original(
    model: nn.MoETransformer, golden: dict[str, Any]
) -> None:
    with torch.no_grad():
        features_BSD, _ = model.features(golden["input_ids"])
        loss = _cross_entropy(model, features_BSD, golden)
    assert float(loss) == pytest.approx(golden["loss"], rel=1e-5)


def test_aux_losses_equal_the_original(model: nn.MoETransformer, golden: dict[str, Any]) -> None:
    with torch.no_grad():
        _, records = model.features(golden["input_ids"])
        balance, z = nn.balance_loss(records), nn.z_loss(records)
    # Theirs are pairs of a value and how it is reduced; over layers both are sums.
    assert float(balance) == pytest.approx(
        golden["metrics"]["load balancing loss unscaled"][0], rel=1e-5
    )
    assert float(z) == pytest.approx(golden["metrics"]["router Z loss unscaled"][0], rel=1e-5)


def test_every_parameter_has_a_golden_gradient(
    model: nn.MoETransformer, golden: dict[str, Any]
) -> None:
    ours = {name for name, _ in model.named_parameters()}
    assert ours == convert_state(golden["grads"], num_experts=NUM_EXPERTS).keys()


@pytest.mark.parametrize(
    "name",
    convert_state(load_golden("model_2layer.pt")["grads"], num_experts=NUM_EXPERTS),
)
def test_gradient_equals_the_original(
    model: nn.MoETransformer, golden: dict[str, Any], name: str
) -> None:
    expected = convert_state(golden["grads"], num_experts=NUM_EXPERTS)[name]
    actual = model.get_parameter(name).grad
    assert actual is not None
    assert_equal_to_1e5(actual, expected)
