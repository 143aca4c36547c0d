"""RouterConfig refuses what cannot work."""

import re
from dataclasses import FrozenInstanceError

import pytest

from lightning_moe.config import RouterConfig


def test_a_router_chooses_one_expert_without_losses_by_default() -> None:
    router = RouterConfig()
    assert (router.top_k, router.gating_function, router.lb_loss_scope) == (
        1,
        "softmax",
        "micro_batch",
    )
    assert router.lb_loss_weight is router.z_loss_weight is router.orth_loss_weight is None


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RouterConfig().top_k = 2


@pytest.mark.parametrize(
    ("options", "has_bias"),
    [
        ({}, False),
        ({"bias": True}, False),
        ({"bias_gamma": 1e-3}, True),
        ({"score_correction_bias": True}, True),
    ],
)
def test_only_a_bias_rule_or_a_correction_bias_gives_a_score_bias(
    options: dict[str, object], has_bias: bool
) -> None:
    assert RouterConfig(**options).has_score_bias is has_bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "model.moe.router.top_k=0 must be at least 1"),
        ({"top_k": -1}, "model.moe.router.top_k=-1 must be at least 1"),
        ({"original_top_k": 0}, "model.moe.router.original_top_k=0 must be at least 1"),
        ({"jitter_eps": 1.0}, "model.moe.router.jitter_eps=1.0 must be finite and at least 0 and"),
        ({"normalize_expert_weights": 0.0}, "normalize_expert_weights=0.0 must be finite and gre"),
        ({"expert_weight_scale": float("inf")}, "expert_weight_scale=inf must be finite"),
        ({"sigmoid_stability_epsilon": -1e-7}, "sigmoid_stability_epsilon=-1e-07 must be finite"),
        ({"bias_gamma": 0.0}, "model.moe.router.bias_gamma=0.0 must be finite and greater than 0"),
        ({"lb_loss_weight": -0.01}, "lb_loss_weight=-0.01 must be finite and at least 0"),
        ({"z_loss_weight": float("nan")}, "model.moe.router.z_loss_weight=nan must be finite"),
        ({"orth_loss_weight": float("-inf")}, "orth_loss_weight=-inf must be finite"),
        (
            {"gating_function": "tanh"},
            "model.moe.router.gating_function='tanh' must be one of softmax, topk_softmax, sigmoid",
        ),
        ({"lb_loss_over_layers": "max"}, "lb_loss_over_layers='max' must be one of sum, mean"),
        (
            {"bias_centering": True},
            "bias_centering=True has no effect with model.moe.router.bias_gamma=None, which never",
        ),
        (
            {"bias_centering": True, "score_correction_bias": True},
            "bias_centering=True has no effect with model.moe.router.bias_gamma=None, which never",
        ),
        (
            {"lb_loss_scope": "exact"},
            "for nothing with model.moe.router.lb_loss_weight=None; set lb_loss_weight, or choose",
        ),
        (
            {"lb_loss_scope": "exact", "lb_loss_weight": 0.0},
            "for nothing with model.moe.router.lb_loss_weight=0.0; set lb_loss_weight, or choose",
        ),
        ({"lb_loss_scope": "batch"}, "lb_loss_scope='batch' must be one of sequence, micro_batch"),
        (
            {"n_group": 4},
            "model.moe.router.n_group=4 and model.moe.router.topk_group=None go together; set both",
        ),
        (
            {"topk_group": 2},
            "model.moe.router.n_group=None and model.moe.router.topk_group=2 go together; set both",
        ),
        ({"n_group": 4, "topk_group": 0}, "model.moe.router.topk_group=0 must be at least 1"),
        (
            {"n_group": 4, "topk_group": 5},
            "topk_group=5 is more than model.moe.router.n_group=4; choose topk_group in [1, 4]",
        ),
        (
            {"n_group": 4, "topk_group": 2, "gating_function": "topk_softmax"},
            "n_group=4 does not work with model.moe.router.gating_function='topk_softmax'; choose",
        ),
        (
            {"random_expert_assignment": True, "gating_function": "topk_softmax"},
            "random_expert_assignment=True does not work with "
            "model.moe.router.gating_function='topk_softmax'; choose softmax or sigmoid",
        ),
        (
            {"random_expert_assignment": True, "uniform_expert_assignment": True},
            "uniform_expert_assignment=True and model.moe.router.random_expert_assignment=True "
            "exclude each other; switch one off",
        ),
    ],
)
def test_a_router_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RouterConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": True}, "model.moe.router.top_k=True must be an integer, got bool"),
        ({"top_k": "2"}, "model.moe.router.top_k='2' must be an integer, got str"),
        ({"top_k": 2.0}, "model.moe.router.top_k=2.0 must be an integer, got float"),
        ({"top_k": None}, "model.moe.router.top_k=None must be an integer, got None"),
        ({"bias": 1}, "model.moe.router.bias=1 must be true or false, got int"),
        ({"lb_loss_weight": "0.01"}, "lb_loss_weight='0.01' must be a number, got str"),
        ({"z_loss_weight": False}, "z_loss_weight=False must be a number, got bool"),
    ],
)
def test_a_router_option_of_the_wrong_type_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        RouterConfig(**options)


@pytest.mark.parametrize("weight", ["lb_loss_weight", "z_loss_weight", "orth_loss_weight"])
def test_a_loss_weight_of_zero_is_kept_apart_from_no_loss(weight: str) -> None:
    assert getattr(RouterConfig(**{weight: 0.0}), weight) == 0.0
