"""Weights of which only the codes are left: everything that goes on without values works, all else is refused."""

import copy
import pickle
import re
from collections.abc import Callable

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from lightning_moe.config import FP8Config, MoEConfig
from lightning_moe.nn import Experts, MoE
from lightning_moe.precision import (
    ReleasedParameter,
    WeightStore,
    quantize_mxfp8,
    release_,
    restore_,
)
from tests.kit.randomized import randomized

WIDTH, HIDDEN = 64, 32


def _released(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    release_(parameter)
    return parameter


def _config(*, fp8_only: bool = True) -> MoEConfig:
    fp8 = FP8Config(emulate=True, fp8_only=fp8_only)
    return MoEConfig(num_experts=2, hidden_size=HIDDEN, backend="mxfp8", fp8=fp8)


def _experts(*, fp8_only: bool = True) -> Experts:
    return randomized(Experts(WIDTH, _config(fp8_only=fp8_only)), torch.Generator().manual_seed(0))


def _release(experts: Experts) -> Experts:
    for name, store in experts.backend.only_stores().items():
        store.hold(experts.get_parameter(name).detach())
        release_(experts.get_parameter(name))
    return experts


def _forward(experts: Experts) -> Tensor:
    return experts(torch.ones(3, WIDTH), torch.tensor([1, 2]))


# ---- the parameter ---------------------------------------------------------------------------------------------


def test_it_stays_the_parameter_it_was_with_one_element_of_memory() -> None:
    module = nn.Linear(5, 3, bias=False)
    weight = module.weight
    release_(weight)
    assert module.weight is weight
    assert type(weight) is ReleasedParameter
    assert dict(module.named_parameters()) == {"weight": weight}
    assert weight.shape == (3, 5)
    assert (weight.dim(), weight.numel(), len(weight)) == (2, 15, 3)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert weight.requires_grad
    assert weight.untyped_storage().nbytes() == 4


def test_hooks_and_gradients_go_on() -> None:
    weight = nn.Parameter(torch.ones(3, 5))
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
    release_(weight)

    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: Tensor) -> Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return torch.full((3, 5), 2.0)

    for _ in range(2):
        Fixed.apply(weight).backward()
    assert weight.grad.eq(4.0).all()
    assert seen == [(3, 5), True] * 2
    weight.grad = None
    assert weight.grad is None


def _step(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(3, 5)
    torch.optim.AdamW([parameter]).step()


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "from_dlpack": torch.from_dlpack,
    "T": lambda p: p.T,
    "norm": lambda p: p.norm(),
    "isfinite": torch.isfinite,
    "_foreach_norm": lambda p: torch._foreach_norm([torch.ones(2), p]),
    "matmul": lambda p: torch.ones(5, 3) @ p,
    "to": lambda p: p.to(torch.bfloat16),
    "cpu": lambda p: p.cpu(),
    "numpy": lambda p: p.numpy(),
    "item": lambda p: p[0, 0].item(),
    "add_": lambda p: torch.no_grad()(lambda: p.add_(1.0))(),
    "copy_": lambda p: torch.no_grad()(lambda: p.copy_(torch.ones(3, 5)))(),
    "set data": lambda p: setattr(p, "data", torch.ones(3, 5)),
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "optimizer": _step,
}


@pytest.mark.parametrize("read", READS)
def test_whatever_needs_values_is_refused_with_the_option_and_the_way_out(read: str) -> None:
    weight = _released(torch.ones(3, 5))
    with pytest.raises(RuntimeError, match=r"model\.moe\.fp8\.fp8_only=True.*fp8_only=false"):
        READS[read](weight)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda p: p.data, "reading .data needs"),
        (lambda p: setattr(p, "data", torch.ones(3, 5)), "setting .data needs"),
        (lambda p: nn.ParameterList([p]).state_dict(), "detach (which state_dict calls) needs"),
        (lambda p: p.clone(), "clone needs"),
    ],
)
def test_the_refusal_names_what_a_user_would_have_written(
    use: Callable[[nn.Parameter], object], said: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(said)} the values"):
        use(_released(torch.ones(3, 5)))


def test_what_goes_around_python_finds_nan_and_writes_nothing() -> None:
    weight = _released(torch.ones(3, 5))
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        assert weight.isnan().all()
        with pytest.raises(RuntimeError, match="more than one element"):
            weight.add_(1.0)


def test_it_can_be_printed() -> None:
    assert repr(_released(torch.ones(3, 5))) == (
        "ReleasedParameter(shape=(3, 5), dtype=torch.float32)"
    )


def test_restored_it_is_a_parameter_like_others() -> None:
    weight = _released(torch.ones(3, 5))
    restore_(weight, torch.full((3, 5), 2.0))
    assert type(weight) is nn.Parameter
    assert (weight + 1).eq(3.0).all()
    assert copy.deepcopy(weight).eq(2.0).all()


# ---- the store -------------------------------------------------------------------------------------------------


def test_a_store_has_the_codes_it_was_given_until_it_lets_go() -> None:
    store, values = WeightStore(quantize_mxfp8), torch.full((2, 32, 32), 3.0)
    weight = _released(torch.ones(2, 32, 32))
    with pytest.raises(RuntimeError, match=r"a forward needs .*fp8_only=True"):
        store.layouts(weight)
    store.hold(values)
    held = store.layouts(weight)
    store.forget()
    assert store.layouts(weight, training=False) is held
    for layout, expected in zip(held, WeightStore(quantize_mxfp8).layouts(values), strict=True):
        assert torch.equal(layout.codes.float(), expected.codes.float())
        assert torch.equal(layout.scales.float(), expected.scales.float())
    store.let_go()
    assert store.nbytes == 0
    with pytest.raises(RuntimeError, match="fp8_only"):
        store.layouts(weight)


def test_a_weight_put_in_the_place_of_a_released_one_is_quantized() -> None:
    store = WeightStore(quantize_mxfp8)
    store.hold(torch.ones(2, 32, 32))
    other = torch.full((2, 32, 32), 2.0)
    assert torch.equal(store.layouts(other)[0].scales, quantize_mxfp8(other).scales)


# ---- experts ---------------------------------------------------------------------------------------------------


def test_released_experts_compute_and_give_gradients_as_before_exactly() -> None:
    kept, released = _experts(fp8_only=False), _release(_experts())
    for mode in (True, False, True):
        outs = [_forward(experts.train(mode)) for experts in (kept, released)]
        assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter.grad, released.get_parameter(name).grad)


def test_training_weights_that_somebody_keeps_is_refused_and_evaluating_them_is_not() -> None:
    experts = _experts()
    with pytest.raises(RuntimeError, match=r"fp8_only=True trains inside of Trainer\.fit"):
        _forward(experts)
    expected = _forward(_experts(fp8_only=False))
    with torch.no_grad():
        assert torch.equal(_forward(experts), expected)
    assert torch.equal(_forward(experts.eval()), expected)


USES: dict[str, Callable[[Experts], object]] = {
    "state_dict": lambda e: e.state_dict(),
    "load_state_dict": lambda e: e.load_state_dict(_experts().state_dict()),
    "a cast": lambda e: e.to(torch.bfloat16),
    "double": lambda e: e.double(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "fewer experts": lambda e: e.keep_(range(1)),
    "another backend": lambda e: _forward(_on(e, "loop")),
    "the same backend anew": lambda e: _forward(_on(e, "mxfp8")),
}


def _on(experts: Experts, backend: str) -> Experts:
    fp8 = FP8Config(emulate=backend == "mxfp8")
    experts.use_backend(backend, fp8, by_plugin=False)
    return experts


@pytest.mark.parametrize("use", USES)
def test_uses_of_released_experts_that_need_their_weights_are_refused(use: str) -> None:
    experts = _release(_experts())
    with pytest.raises(RuntimeError, match=r"model\.moe\.fp8\.fp8_only=True"):
        USES[use](experts)


def test_a_refused_cast_leaves_the_experts_as_they_were() -> None:
    experts = _release(_experts())
    before = _forward(experts)
    with pytest.raises(RuntimeError, match=r"a cast to torch\.bfloat16"):
        experts.to(torch.bfloat16)
    assert list(experts._parameters) == list(_experts()._parameters)
    assert torch.equal(_forward(experts), before)


def test_moving_released_experts_to_where_they_are_changes_nothing() -> None:
    experts = _release(_experts())
    before = _forward(experts)
    assert torch.equal(_forward(experts.cpu().to(torch.float32)), before)


def test_on_another_device_their_codes_are_gone_and_said_to_be() -> None:
    experts = _release(_experts()).to("meta")
    assert all(store.nbytes == 0 for store in experts.backend.only_stores().values())
    with pytest.raises(RuntimeError, match=r"a forward needs .*fp8_only=True"):
        _forward(experts)


# torch 2.13 warns of what its own tracer does.
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_goes_around_released_weights(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tracer can't follow the shape checker.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    layer = randomized(MoE(WIDTH, _config()), generator)
    x = torch.randn(5, WIDTH, generator=generator, requires_grad=True)
    _release(layer.experts)
    (eager,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    torch._dynamo.reset()
    layer.compile(backend="aot_eager")
    (compiled,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    torch.testing.assert_close(compiled, eager)
