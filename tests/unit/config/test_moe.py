"""RouterConfig, LatentMoEConfig, SharedExpertConfig and MoEConfig refuse what cannot work."""

import re
from dataclasses import FrozenInstanceError

import pytest

from lightning_moe.config import (
    LatentMoEConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)


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
        RouterConfig().top_k = 2  # type: ignore[misc]


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


def test_as_many_choices_as_experts_are_accepted() -> None:
    assert MoEConfig(num_experts=5, router=RouterConfig(top_k=5)).router.top_k == 5


def test_groups_that_hold_exactly_the_choices_are_accepted() -> None:
    router = RouterConfig(top_k=4, n_group=3, topk_group=2)
    assert MoEConfig(num_experts=6, router=router).num_experts == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "model.moe.num_experts=0 must be at least 1"),
        ({"hidden_size": 0}, "model.moe.hidden_size=0 must be at least 1"),
        ({"activation": "gelu"}, "model.moe.activation='gelu' must be one of swiglu, relu2, gpt_"),
        ({"backend": "cutlass"}, "model.moe.backend='cutlass' must be one of auto, loop, torch"),
        (
            {"num_experts": 4, "router": RouterConfig(top_k=5)},
            "model.moe.router.top_k=5 is more than model.moe.num_experts=4; "
            "choose top_k in [1, 4] or more experts",
        ),
        (
            {"num_experts": 6, "router": RouterConfig(n_group=4, topk_group=1)},
            "model.moe.num_experts=6 is not a multiple of model.moe.router.n_group=4; "
            "choose a divisor of 6 for n_group",
        ),
        (
            {"num_experts": 6, "router": RouterConfig(top_k=5, n_group=3, topk_group=2)},
            "model.moe.router.top_k=5 is more than the 4 experts in model.moe.router.topk_group=2 "
            "of model.moe.router.n_group=3 groups (model.moe.num_experts=6); lower top_k",
        ),
        (
            {"activation_alpha": 1.5},
            "model.moe.activation_alpha=1.5 has no effect with model.moe.activation='swiglu'; "
            "unset it or choose gpt_oss_swiglu",
        ),
        (
            {"activation": "relu2", "activation_limit": 7.0},
            "model.moe.activation_limit=7.0 has no effect with model.moe.activation='relu2'",
        ),
        (
            {"activation": "gpt_oss_swiglu", "activation_limit": 0.0},
            "model.moe.activation_limit=0.0 must be finite and greater than 0",
        ),
    ],
)
def test_an_moe_layer_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MoEConfig(**options)


def test_gpt_oss_takes_slope_and_limit() -> None:
    moe = MoEConfig(activation="gpt_oss_swiglu", activation_alpha=1.5, activation_limit=7.0)
    assert (moe.activation_alpha, moe.activation_limit) == (1.5, 7.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"router": {"top_k": 2}},
            "model.moe.router={'top_k': 2} must be of type RouterConfig, got dict",
        ),
        ({"router": None}, "model.moe.router=None must be of type RouterConfig, got None"),
        ({"latent": 8}, "model.moe.latent=8 must be of type LatentMoEConfig, got int"),
        ({"shared": RouterConfig()}, "must be of type SharedExpertConfig, got RouterConfig"),
        ({"expert_bias": "no"}, "model.moe.expert_bias='no' must be true or false, got str"),
    ],
)
def test_a_section_of_the_wrong_type_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        MoEConfig(**options)


def test_a_latent_width_below_the_model_width_passes() -> None:
    MoEConfig(latent=LatentMoEConfig(latent_dim=7)).check_width(8)


@pytest.mark.parametrize("latent_dim", [8, 9])
def test_a_latent_width_that_is_not_below_the_model_width_is_refused(latent_dim: int) -> None:
    message = (
        f"model.moe.latent.latent_dim={latent_dim} is not smaller than model.d_model=8; "
        f"choose latent_dim in [1, 7], or unset latent"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        MoEConfig(latent=LatentMoEConfig(latent_dim=latent_dim)).check_width(8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LatentMoEConfig(latent_dim=0), "model.moe.latent.latent_dim=0 must be at least 1"),
        (
            lambda: SharedExpertConfig(hidden_size=0),
            "model.moe.shared.hidden_size=0 must be at least 1",
        ),
        (
            lambda: SharedExpertConfig(activation="gpt_oss_swiglu"),
            "model.moe.shared.activation='gpt_oss_swiglu' must be one of swiglu, relu2",
        ),
    ],
)
def test_a_latent_or_shared_section_that_cannot_work_is_refused(
    build: type[object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
