"""The router is never narrower than float32, whatever is done to the model around it."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE, Router
from tests.kit.randomized import randomized

CONFIG = RouterConfig(top_k=2, bias=True, bias_gamma=1e-3)


def _router(generator: torch.Generator) -> Router:
    return randomized(Router(5, 3, CONFIG), generator)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to(bf16)": lambda module: module.to(torch.bfloat16),
    "to(fp16)": lambda module: module.to(torch.float16),
    "bfloat16()": lambda module: module.bfloat16(),
    "half()": lambda module: module.half(),
    "float()": lambda module: module.float(),
    "bf16 and back": lambda module: module.bfloat16().float(),
    "type()": lambda module: module.type(torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "cast copy": lambda module: copy.deepcopy(module.half()),
    "pickle": lambda module: pickle.loads(pickle.dumps(module.half())),
    "cpu()": lambda module: module.bfloat16().cpu(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_keep_float32_and_every_value_exactly(name: str, generator: torch.Generator) -> None:
    router = _router(generator)
    before = {key: value.clone() for key, value in router.state_dict().items()}
    after = CASTS[name](nn.ModuleDict({"router": router}))["router"]
    assert after.state_dict().keys() == before.keys()
    for key, value in after.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[key])


def test_cast_of_a_layer_casts_its_experts_but_not_its_router() -> None:
    layer = MoE(8, MoEConfig(num_experts=3, hidden_size=4, router=CONFIG)).bfloat16()
    assert layer.router.weight.dtype == torch.float32
    assert layer.experts.w_down.dtype == torch.bfloat16


def test_double_widens_the_weights_and_not_the_score_bias(generator: torch.Generator) -> None:
    router = _router(generator)
    before = router.score_bias.clone()
    router.double()
    assert router.weight.dtype == router.bias.dtype == torch.float64
    assert router.score_bias.dtype == torch.float32
    assert torch.equal(router.score_bias, before)
    assert router.bfloat16().weight.dtype == torch.float32


def test_parameters_stay_the_same_objects_and_gradients_their_type(
    generator: torch.Generator,
) -> None:
    router = _router(generator)
    weight = router.weight
    router(torch.randn(4, 5, generator=generator))[0].sum().backward()
    gradient = router.weight.grad.clone()
    router.bfloat16()
    assert router.weight is weight
    assert router.weight.grad.dtype == torch.float32
    assert torch.equal(router.weight.grad, gradient)


def test_low_precision_default_does_not_narrow_a_new_router() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = Router(5, 3, CONFIG)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {value.dtype for value in router.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
def test_to_empty_from_the_meta_device_keeps_float32(cast: torch.dtype) -> None:
    with torch.device("meta"):
        router = Router(5, 3, CONFIG)
    router = router.to(cast).to_empty(device="cpu")
    assert {value.dtype for value in router.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_low_precision_state_keeps_float32(
    assign: bool, generator: torch.Generator
) -> None:
    router = _router(generator)
    low = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(low, assign=assign)
    for name, value in router.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, low[name].float())


def test_state_dict_round_trip_is_exact(generator: torch.Generator) -> None:
    source, target = _router(generator), Router(5, 3, CONFIG)
    assert set(source.state_dict()) == {"weight", "bias", "score_bias"}
    target.load_state_dict(source.state_dict())
    x = torch.randn(7, 5, generator=generator)
    for ours, theirs in zip(target(x)[:2], source(x)[:2], strict=True):
        assert torch.equal(ours, theirs)


def _close_logits() -> tuple[Router, Tensor]:
    """Three logits that bfloat16, whose spacing near 5 is 1/32, would merge."""
    router = Router(2, 3, RouterConfig(top_k=3, z_loss_weight=0.1))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[5.0, 0.0], [5.004, 0.0], [5.008, 0.0]]))
    return router, torch.tensor([[1.0, 0.0]])


def test_close_logits_are_told_apart_under_autocast() -> None:
    router, x = _close_logits()
    expected = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, ids, record = router(x)
        low = router(x.bfloat16())
    assert ids.tolist() == low[1].tolist() == [[2, 1, 0]]
    assert torch.equal(weights, expected[0])
    assert weights.dtype == record.score_sums_E.dtype == torch.float32
    assert torch.equal(record.logz_squared, expected[2].logz_squared)


def test_close_logits_are_told_apart_after_a_cast() -> None:
    router, x = _close_logits()
    weights, ids, record = router.bfloat16()(x.bfloat16())
    assert ids.tolist() == [[2, 1, 0]]
    assert weights.dtype == record.logz_squared.dtype == torch.float32


def test_router_learns_under_autocast() -> None:
    router, x = _close_logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, _, _ = router(x)
    weights[0, 0].backward()
    assert router.weight.grad.dtype == torch.float32
    assert router.weight.grad.abs().sum() > 0
