"""What the router chooses, weighs and records."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE, Router, balance_loss, z_loss
from lightning_moe.nn import router as router_module
from tests.kit import reference
from tests.kit.randomized import randomized

NORMS = (None, 1.0, 2.0)
SCALES: tuple[dict[str, Any], ...] = (
    {},
    {"restore_weight_scale": True, "expert_weight_scale": 0.3, "original_top_k": 5},
)
GROUPS: tuple[dict[str, Any], ...] = ({}, {"n_group": 4, "topk_group": 2})


def _router(config: RouterConfig, generator: torch.Generator, *, num_experts: int = 8) -> Router:
    """Reads five channels."""
    return randomized(Router(5, num_experts, config), generator).double()


def _tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, 5, generator=generator, dtype=torch.float64)


def _all_configs() -> list[RouterConfig]:
    return [
        RouterConfig(
            top_k=3,
            gating_function=gating,
            normalize_expert_weights=norm,
            bias=biased,
            score_correction_bias=biased,
            z_loss_weight=0.1,
            **scale,
            **groups,
        )
        for gating, norm, scale, groups, biased in product(
            ("softmax", "topk_softmax", "sigmoid"), NORMS, SCALES, GROUPS, (False, True)
        )
        if not (gating == "topk_softmax" and groups)
    ]


@pytest.mark.parametrize("config", _all_configs(), ids=lambda _: "")
def test_every_option_equals_the_reference_with_gradients(
    config: RouterConfig, generator: torch.Generator
) -> None:
    router, x = _router(config, generator), _tokens(generator, 7).requires_grad_()
    expected = reference.router(
        x, router.weight, config, bias=router.bias, score_bias=router.score_bias
    )
    weights, ids, record = router(x)
    assert ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(weights, expected.weights)
    torch.testing.assert_close(record.score_sums_E, expected.shares.sum(dim=0))
    torch.testing.assert_close(record.logz_squared, (expected.logz**2).sum())
    assert record.requested_E.tolist() == reference.count(expected.ids, 8)
    assert record.kept_E.tolist() == record.requested_E.tolist()
    assert record.num_tokens.item() == 7
    mix = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    ours = (weights * mix).sum() + balance_loss([record]) + z_loss([record])
    wanted = (expected.weights * mix).sum() + reference.balance_loss(expected.ids, expected.shares)
    wanted = wanted + reference.z_loss(expected.logz)
    leaves = [x, *router.parameters()]
    gradients = [torch.autograd.grad(loss, leaves) for loss in (ours, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_confident_router_has_a_balance_loss_of_3_97() -> None:
    # Logits (6, 0, 0, 0). Scoring the scores once more would give 1.89.
    router = Router(1, 4, RouterConfig())
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[6.0], [0], [0], [0]]))
    _, ids, record = router(torch.ones(5, 1))
    assert ids.unique().tolist() == [0]
    assert balance_loss([record]).item() == pytest.approx(3.9705, abs=5e-5)


def test_bias_takes_part_in_the_choice_and_not_in_the_weights() -> None:
    router = Router(1, 3, RouterConfig(top_k=1, score_correction_bias=True))
    with torch.no_grad():
        router.weight.zero_()
        router.score_bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
    weights, ids, _ = router(torch.ones(2, 1))
    assert ids.tolist() == [[2], [2]]
    torch.testing.assert_close(weights, torch.full((2, 1), 1 / 3))


def test_router_without_correction_has_no_score_bias() -> None:
    assert Router(5, 3, RouterConfig()).score_bias is None
    assert Router(5, 3, RouterConfig(bias_gamma=1e-3)).score_bias.tolist() == [0, 0, 0]


def test_a_single_expert_gets_every_token_with_weight_one() -> None:
    weights, ids, record = Router(5, 1, RouterConfig())(torch.randn(4, 5))
    assert (weights.tolist(), ids.tolist()) == ([[1.0]] * 4, [[0]] * 4)
    assert record.requested_E.tolist() == [4]


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top_k=4 is more than model\.moe\.num_experts=3"):
        Router(5, 3, RouterConfig(top_k=4))


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3), (2, 0), (2, 3, 4)])
def test_results_have_the_shape_of_the_tokens(
    shape: tuple[int, ...], generator: torch.Generator
) -> None:
    router = _router(RouterConfig(top_k=2, z_loss_weight=0.1), generator)
    x = _tokens(generator, *shape)
    weights, ids, record = router(x)
    assert weights.shape == ids.shape == (*shape, 2)
    flat = router(x.flatten(0, -2))
    assert torch.equal(weights.flatten(0, -2), flat[0])
    assert record.requested_E.tolist() == flat[2].requested_E.tolist()
    assert (balance_loss([record]) + z_loss([record])).isfinite()


def test_jitter_moves_logits_only_while_training(generator: torch.Generator) -> None:
    still = _router(RouterConfig(top_k=2), generator)
    shaken = _router(RouterConfig(top_k=2, jitter_eps=0.1), generator)
    shaken.load_state_dict(still.state_dict())
    x = _tokens(generator, 7)
    before = x.clone()
    assert not torch.equal(shaken(x)[0], still(x)[0])
    assert torch.equal(shaken.eval()(x)[0], still(x)[0])
    assert torch.equal(x, before)


def test_jitter_stays_within_its_range(generator: torch.Generator) -> None:
    # softmax of (u * 1, 0): u = log(w / (1 - w)).
    router = Router(1, 2, RouterConfig(top_k=2, jitter_eps=0.25)).double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0], [0.0]]))
    weights, _, _ = router(torch.ones(500, 1, dtype=torch.float64))
    factors = weights[:, 0].logit()
    assert 0.75 <= factors.min() < 0.77
    assert 1.23 < factors.max() <= 1.25
    assert abs(factors.mean() - 1) < 0.03


def test_random_assignment_ignores_the_tokens_and_has_a_gradient_of_exactly_zero(
    generator: torch.Generator,
) -> None:
    router = _router(RouterConfig(top_k=2, random_expert_assignment=True), generator)
    x = _tokens(generator, 200)
    weights, ids, record = router(x)
    (weights.sum() + balance_loss([record])).backward()
    assert torch.equal(router.weight.grad, torch.zeros(8, 5).double())
    assert not torch.equal(router(x)[1], ids)
    assert record.requested_E.min() > 200 * 2 / 8 / 2
    assert ((weights >= 0) & (weights <= 1)).all()


def test_uniform_assignment_is_round_robin_with_real_scores(generator: torch.Generator) -> None:
    config = RouterConfig(top_k=3, uniform_expert_assignment=True)
    router, x = _router(config, generator), _tokens(generator, 8)
    weights, ids, record = router(x)
    assert ids.tolist() == [[(3 * t + k) % 8 for k in range(3)] for t in range(8)]
    assert record.requested_E.tolist() == [3] * 8
    scores = (x @ router.weight.t()).softmax(dim=-1)
    torch.testing.assert_close(weights, scores.gather(-1, ids))


def test_scores_closer_than_the_grid_tie_and_the_lowest_index_wins() -> None:
    # Near 0.5, a logit that differs by 1e-5 moves the softmax by 2.5e-6: far below 2^-14.
    chosen = {}
    for quantize in (False, True):
        router = Router(1, 2, RouterConfig(quantize_scores=quantize))
        with torch.no_grad():
            router.weight.copy_(torch.tensor([[1.0], [1.00001]]))
        weights, ids, _ = router(torch.ones(1, 1))
        chosen[quantize] = ids.item()
        # The weight is the unrounded score.
        assert weights.item() == torch.softmax(router.weight.flatten(), 0)[ids.item()].item()
    assert chosen == {False: 1, True: 0}


def test_non_finite_token_leaves_the_others_unchanged_exactly(generator: torch.Generator) -> None:
    router, x = _router(RouterConfig(top_k=2), generator), _tokens(generator, 6)
    weights, ids, _ = router(x)
    for poison in (torch.nan, torch.inf):
        spoiled = x.clone()
        spoiled[2, 1] = poison
        others = [0, 1, 3, 4, 5]
        new_weights, new_ids, _ = router(spoiled)
        assert torch.equal(new_weights[others], weights[others])
        assert torch.equal(new_ids[others], ids[others])
        assert 0 <= new_ids.min() <= new_ids.max() < 8
        assert all(len(set(row)) == 2 for row in new_ids.tolist())


def test_printed_router_names_its_experts_choices_and_gate() -> None:
    router = Router(5, 3, RouterConfig(top_k=2, gating_function="sigmoid"))
    assert "experts=3, top_k=2, gating=sigmoid" in repr(router)


@pytest.mark.parametrize("norm_p", [1.0, 2.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"gating_function": "sigmoid", "sigmoid_stability_epsilon": 0.0},
        {"gating_function": "sigmoid", "sigmoid_stability_epsilon": 1e-30},
        {"gating_function": "sigmoid"},
        {"score_correction_bias": True},
        {"uniform_expert_assignment": True},
    ],
    ids=["sigmoid without epsilon", "tiny epsilon", "sigmoid", "bias", "round robin"],
)
def test_weights_and_gradients_are_right_where_all_chosen_scores_vanish(
    options: dict[str, Any], norm_p: float
) -> None:
    # In float32 the scores of the first two experts, which are chosen, are rounded to 0 or to the epsilon.
    config = RouterConfig(top_k=2, normalize_expert_weights=norm_p, **options)
    logits = torch.tensor([[-130.0], [-131.0], [20.0 if "sigmoid" not in str(options) else -150.0]])
    routed = []
    for dtype in (torch.float32, torch.float64):
        router = Router(1, 3, config).to(dtype)
        with torch.no_grad():
            router.weight.copy_(logits)
            if router.score_bias is not None:
                router.score_bias[:2] = 5.0
        x = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        weights, ids, record = router(x)
        (weights[0, 0] + 0.1 * record.score_sums_E[0]).backward()
        assert ids.tolist() == [[0, 1]]
        routed.append((weights, record.score_sums_E, router.weight.grad, x.grad))
    for narrow, wide in zip(*routed, strict=True):
        # The gradient of the token is a difference of terms a hundred times as large.
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-4)
    assert routed[0][0].norm(p=norm_p).item() == pytest.approx(1.0, rel=1e-5)


CONSTANT = [{"normalize_expert_weights": 1.0}, {"gating_function": "topk_softmax"}]


@pytest.mark.parametrize("options", CONSTANT)
def test_a_router_that_the_model_cannot_train_warns_once(options: dict[str, Any]) -> None:
    router_module._warn_of_constant_weights.cache_clear()  # another test may have been first
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(3):
            MoE(5, MoEConfig(num_experts=3, hidden_size=4, router=RouterConfig(**options)))
    [warning] = shown
    assert "model.moe.router.top_k=1 with model.moe.router." in str(warning.message)
    assert "no gradient from the loss of the model" in str(warning.message)


@pytest.mark.parametrize("options", CONSTANT)
def test_a_router_that_the_model_can_train_does_not_warn(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router_module._warn_of_constant_weights.cache_clear()
        Router(5, 3, RouterConfig())
        Router(5, 3, RouterConfig(top_k=2, **options))
        Router(5, 3, RouterConfig(uniform_expert_assignment=True, **options))
