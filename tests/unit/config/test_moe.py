"""LatentMoEConfig, SharedExpertConfig and MoEConfig refuse what cannot work."""

import re

import pytest

from lightning_moe.config import (
    LatentMoEConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)


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
            lambda: LatentMoEConfig(latent_dim=3, norm=True),
            "model.moe.latent.norm=True is not a kind of norm; write rms",
        ),
        (
            lambda: LatentMoEConfig(latent_dim=3, norm=False),
            "model.moe.latent.norm=False is not a kind of norm; write null (None in Python)",
        ),
        (
            lambda: LatentMoEConfig(latent_dim=3, norm="batch"),
            "model.moe.latent.norm='batch' must be one of rms, layer",
        ),
        (
            lambda: LatentMoEConfig(latent_dim=3, norm="rms", norm_eps=0.0),
            "model.moe.latent.norm_eps=0.0 must be finite and greater than 0",
        ),
        (
            lambda: LatentMoEConfig(latent_dim=3, norm_bias=True),
            "model.moe.latent.norm_bias=True has no effect without a norm; unset it or choose "
            "model.moe.latent.norm=rms or layer",
        ),
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
