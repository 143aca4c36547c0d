"""The mixture-of-experts layer against the loop over tokens and choices."""

import copy
import dataclasses
import gc
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.config import LatentMoEConfig, MoEConfig, RouterConfig, SharedExpertConfig
from lightning_moe.nn import Dispatched, LocalDispatcher, MoE, balance_loss, z_loss
from tests.kit import reference
from tests.kit.randomized import randomized

ROUTER = RouterConfig(top_k=2, score_correction_bias=True, z_loss_weight=0.1, lb_loss_weight=0.1)
EPS = 1e-6


def _layer(generator: torch.Generator, *, router: RouterConfig = ROUTER, **options: Any) -> MoE:
    """Width 6, three hidden channels per expert, five experts unless `options` say otherwise."""
    config = MoEConfig(**{"num_experts": 5, "hidden_size": 3, "router": router, **options})
    return randomized(MoE(6, config, norm_eps=EPS), generator).double()


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, 6, generator=generator, dtype=torch.float64)


def _assert_equals_reference(layer: MoE, x: Tensor, generator: torch.Generator) -> None:
    """Outputs, record, and the gradients of the input and of every parameter."""
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    x.requires_grad_()
    expected, routed = reference.moe(x.flatten(0, -2), weights, layer.config, norm_eps=EPS)
    y, record = layer(x)
    torch.testing.assert_close(y, expected.view_as(x))
    num_experts = layer.config.num_experts
    assert record.requested_E.tolist() == reference.count(routed.ids, num_experts)
    mix = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    ours = (y * mix).sum() + balance_loss([record]) + z_loss([record])
    wanted = (expected.view_as(x) * mix).sum()
    wanted = wanted + reference.balance_loss(routed.ids, routed.shares)
    wanted = wanted + reference.z_loss(routed.logz)
    names = ["x", *dict(layer.named_parameters())]
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad(ours, leaves)
    # materialize_grads: experts that no token chose take no part in the reference.
    expected_gradients = torch.autograd.grad(wanted, leaves, materialize_grads=True)
    for name, got, want in zip(names, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "gpt_oss_swiglu"])
@pytest.mark.parametrize(
    ("latent", "shared", "expert_bias"),
    [
        *product((None,), (None, SharedExpertConfig(hidden_size=4)), (False, True)),
        (LatentMoEConfig(latent_dim=4), None, True),
        (
            LatentMoEConfig(latent_dim=4, bias=True, norm="rms"),
            SharedExpertConfig(hidden_size=7),
            False,
        ),
        (
            LatentMoEConfig(latent_dim=2, norm="rms", norm_eps=0.5, norm_bias=True),
            SharedExpertConfig(hidden_size=2, activation="relu2"),
            True,
        ),
        (LatentMoEConfig(latent_dim=3, norm="layer", norm_eps=0.5, norm_bias=True), None, False),
        (LatentMoEConfig(latent_dim=3, norm="layer"), None, False),
    ],
)
def test_every_option_equals_the_reference_with_gradients(
    activation: str,
    latent: LatentMoEConfig | None,
    shared: SharedExpertConfig | None,
    expert_bias: bool,
    generator: torch.Generator,
) -> None:
    limits = {"activation_alpha": 1.2, "activation_limit": 0.8}
    layer = _layer(
        generator,
        activation=activation,
        latent=latent,
        shared=shared,
        expert_bias=expert_bias,
        **(limits if activation == "gpt_oss_swiglu" else {}),
    )
    _assert_equals_reference(layer, _tokens(generator, 2, 4), generator)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 3), (5, 1), (8, 2)])
@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_every_number_of_choices_equals_the_reference_with_gradients(
    num_experts: int, top_k: int, gating: str, generator: torch.Generator
) -> None:
    router = RouterConfig(top_k=top_k, gating_function=gating, z_loss_weight=0.1)
    layer = _layer(generator, num_experts=num_experts, router=router, expert_bias=True)
    _assert_equals_reference(layer, _tokens(generator, 7), generator)


def test_all_experts_together_are_the_dense_mixture(generator: torch.Generator) -> None:
    layer = _layer(generator, router=RouterConfig(top_k=5))
    x = _tokens(generator, 7)
    weights, experts = dict(layer.named_parameters()), range(5)
    shares = (x @ layer.router.weight.t()).softmax(dim=-1)
    dense = [
        sum(row[e] * reference.expert(token, weights, e, layer.config) for e in experts)
        for token, row in zip(x, shares, strict=True)
    ]
    torch.testing.assert_close(layer(x)[0], torch.stack(dense))


def _crowded(generator: torch.Generator, backend: str) -> MoE:
    """A float32 layer whose five tokens all go to experts 1 and 3 of four."""
    router = RouterConfig(top_k=2, score_correction_bias=True)
    config = MoEConfig(
        num_experts=4, hidden_size=4, router=router, expert_bias=True, backend=backend
    )
    layer = randomized(MoE(8, config), generator)
    layer.router.score_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))
    return layer


@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_idle_experts_get_a_gradient_of_exactly_zero(
    backend: str, generator: torch.Generator
) -> None:
    layer = _crowded(generator, backend)
    y, record = layer(torch.randn(5, 8, generator=generator))
    poison = [torch.full((128,), torch.nan) for _ in range(50)]
    del poison
    y.square().sum().backward()
    assert record.requested_E.tolist() == [0, 5, 0, 5]
    for parameter in layer.experts.parameters():
        assert torch.equal(parameter.grad[[0, 2]], torch.zeros_like(parameter[[0, 2]]))
        assert (parameter.grad[[1, 3]].flatten(1).abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("backend", ["loop", "torch"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_a_call_without_tokens_gives_no_rows_and_zero_gradients(
    backend: str, shape: tuple[int, ...], generator: torch.Generator
) -> None:
    layer = _crowded(generator, backend)
    x = torch.zeros(*shape, 8, requires_grad=True)
    y, record = layer(x)
    (y.sum() + balance_loss([record])).backward()
    assert y.shape == x.shape
    assert record.num_tokens.item() == 0
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "gpt_oss_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_backends_agree_with_gradients(
    activation: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    results = []
    x = torch.randn(7, 8, generator=generator).to(dtype)
    state = None
    for backend in ("loop", "torch"):
        config = MoEConfig(
            num_experts=5,
            hidden_size=16,
            router=ROUTER,
            backend=backend,
            activation=activation,
            expert_bias=True,
        )
        layer = randomized(MoE(8, config), generator, std=0.3)
        layer.load_state_dict(state or layer.state_dict())
        state = layer.state_dict()
        layer.to(dtype)
        y, _ = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
    # bf16: sums in another order differ by a rounding, 2^-8 relative.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for looped, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, **tolerance)


def test_output_ignores_which_tokens_are_valid_exactly(generator: torch.Generator) -> None:
    layer, x = _layer(generator), _tokens(generator, 2, 4)
    valid = torch.tensor([[True, True, False, False], [True, False, False, False]])
    y, record = layer(x, valid)
    assert torch.equal(y, layer(x)[0])
    assert record.num_tokens.item() == 3
    assert record.requested_E.sum().item() == 6


def test_order_of_tokens_does_not_matter(generator: torch.Generator) -> None:
    layer, x = _layer(generator, shared=SharedExpertConfig(hidden_size=4)), _tokens(generator, 7)
    order = torch.randperm(7, generator=generator)
    torch.testing.assert_close(layer(x[order])[0], layer(x)[0][order])


def test_non_finite_token_leaves_the_others_unchanged(generator: torch.Generator) -> None:
    layer, x = _layer(generator), _tokens(generator, 6)
    expected = layer(x)[0]
    spoiled = x.clone()
    spoiled[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(layer(spoiled)[0][others], expected[others])
    assert layer(spoiled)[0][2].isnan().all()


@pytest.mark.parametrize("kind", ["bf16 module", "autocast"])
def test_low_precision_stays_close_to_float32(kind: str, generator: torch.Generator) -> None:
    config = MoEConfig(
        num_experts=4,
        hidden_size=8,
        router=ROUTER,
        expert_bias=True,
        latent=LatentMoEConfig(latent_dim=8, norm="rms"),
        shared=SharedExpertConfig(hidden_size=8),
    )
    layer = randomized(MoE(16, config), generator, std=0.3)
    x = torch.randn(7, 16, generator=generator).bfloat16().float()
    expected, record = layer(x)
    if kind == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, low = layer(x)
    else:
        y, low = layer.bfloat16()(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert low.requested_E.tolist() == record.requested_E.tolist()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    # A chain of four bf16 matmuls: a few roundings of 2^-8.
    error = (y.float() - expected).norm() / expected.norm()
    assert error < 2e-2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_layer_give_the_same_output_exactly(
    copied: Any,
    generator: torch.Generator,
) -> None:
    layer, x = _layer(generator, activation="gpt_oss_swiglu"), _tokens(generator, 4)
    twin = copied(layer)
    assert torch.equal(twin(x)[0], layer(x)[0])
    with torch.no_grad():
        twin.experts.w_down.zero_()
    assert layer(x)[0].abs().sum() > 0


def test_state_dict_round_trip_is_exact(generator: torch.Generator) -> None:
    options = {
        "expert_bias": True,
        "latent": LatentMoEConfig(latent_dim=4, bias=True, norm="rms"),
        "shared": SharedExpertConfig(hidden_size=4),
    }
    source, target = (_layer(generator, **options) for _ in range(2))
    x = _tokens(generator, 5)
    assert not torch.equal(target(x)[0], source(x)[0])
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(x)[0], source(x)[0])


def test_latent_width_must_be_below_the_model_width() -> None:
    config = MoEConfig(num_experts=2, latent=LatentMoEConfig(latent_dim=6))
    with pytest.raises(ValueError, match=r"latent_dim=6 is not smaller than model\.d_model=6"):
        MoE(6, config)


def _live_tensors() -> int:
    gc.collect()
    # By type: isinstance would wake the lazy objects of other packages.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("training", [True, False])
def test_fifty_forwards_leave_no_tensor_behind(training: bool, generator: torch.Generator) -> None:
    layer, x = _layer(generator).train(training), _tokens(generator, 2, 4)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(x)
    before = _live_tensors()
    for _ in range(50):
        layer(x)
    assert _live_tensors() <= before
    assert all(torch.equal(state[name], value) for name, value in layer.state_dict().items())


def test_layer_runs_under_deterministic_algorithms(generator: torch.Generator) -> None:
    layer, x = _layer(generator, expert_bias=True), _tokens(generator, 7)
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            y, record = layer(x)
            loss = y.square().sum() + balance_loss([record])
            gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


class _Dropping(LocalDispatcher):
    """Claims, while training, to have kept the first choice of all tokens but the first two."""

    def for_mode(self, *, training: bool) -> LocalDispatcher:
        """Itself while training, else one that drops nothing."""
        return self if training else LocalDispatcher()

    def receive(self, flight: Dispatched) -> Dispatched:
        """The same rows, as if some were missing."""
        kept_TK = torch.zeros(flight.back.inverse_TK.shape, dtype=torch.bool)
        kept_TK[2:, 0] = True
        return dataclasses.replace(flight, kept_TK=kept_TK)


def test_record_says_what_the_dispatcher_kept_and_what_was_requested(
    generator: torch.Generator,
) -> None:
    layer, x = _layer(generator), _tokens(generator, 7)
    expected = layer(x)[1].requested_E.tolist()
    first_choices = layer.router(x)[1][:, 0].tolist()
    layer.dispatcher = _Dropping()
    record = layer(x)[1]
    assert record.requested_E.tolist() == expected
    assert record.kept_E.tolist() == [first_choices[2:].count(expert) for expert in range(5)]
    assert record.lost_tokens.item() == 2
    record = layer.eval()(x)[1]
    assert (record.requested_E.tolist(), record.kept_E.tolist()) == (expected, expected)
    assert record.lost_tokens is None


def test_padding_is_neither_kept_nor_lost(generator: torch.Generator) -> None:
    layer, x = _layer(generator), _tokens(generator, 7)
    first_choices = layer.router(x)[1][:, 0].tolist()
    layer.dispatcher = _Dropping()
    valid = torch.tensor([True, False, True, True, False, True, True])
    record = layer(x, valid)[1]
    counted = [first_choices[token] for token in (2, 3, 5, 6)]
    assert record.kept_E.tolist() == [counted.count(expert) for expert in range(5)]
    assert record.lost_tokens.item() == 1
