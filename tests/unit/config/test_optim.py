"""OptimConfig refuses options that are out of range or without effect."""

import re

import pytest

from lightning_moe.config import OptimConfig


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup": 100},
        {"schedule": "cosine", "min_lr_ratio": 0.1},
        {"schedule": "cosine", "warmup": 5, "total": 5},
        {"schedule": "wsd", "decay": 3, "decay_shape": "1-sqrt"},
        {"schedule": "wsd", "unit": "tokens", "warmup": 10, "decay": 20, "total": 30},
    ],
)
def test_a_schedule_whose_options_have_an_effect_is_accepted(options: dict[str, object]) -> None:
    config = OptimConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, "optim.lr=-0.001 must be finite and at least 0"),
        ({"lr": float("nan")}, "optim.lr=nan must be finite"),
        ({"weight_decay": float("inf")}, "optim.weight_decay=inf must be finite"),
        ({"expert_lr_scale": -1.0}, "optim.expert_lr_scale=-1.0 must be finite and at least 0"),
        ({"betas": (0.9,)}, "optim.betas=(0.9,) must be two numbers"),
        ({"betas": (0.9, 1.0)}, "optim.betas[1]=1.0 must be finite and at least 0 and below 1"),
        ({"schedule": "linear"}, "optim.schedule='linear' must be one of constant, cosine, wsd"),
        ({"unit": "epochs"}, "optim.unit='epochs' must be one of steps, tokens"),
        ({"decay_shape": "sqrt"}, "optim.decay_shape='sqrt' must be one of linear, 1-sqrt"),
        ({"warmup": -1}, "optim.warmup=-1 must be at least 0"),
        ({"max_skipped_steps": -1}, "optim.max_skipped_steps=-1 must be at least 0"),
        ({"schedule": "cosine", "total": 0}, "optim.total=0 must be at least 1"),
        (
            {"schedule": "cosine", "min_lr_ratio": 1.1},
            "optim.min_lr_ratio=1.1 must be finite and between 0 and 1",
        ),
        (
            {"schedule": "cosine", "decay": 5},
            "optim.decay=5 has no effect with optim.schedule=cosine; unset it or choose schedule w",
        ),
        (
            {"decay_shape": "1-sqrt"},
            "optim.decay_shape=1-sqrt has no effect with optim.schedule=constant; unset it or ch",
        ),
        (
            {"min_lr_ratio": 0.1},
            "optim.min_lr_ratio=0.1 has no effect with optim.schedule=constant; unset it or choose "
            "schedule cosine or wsd",
        ),
        ({"total": 9}, "optim.total=9 has no effect with optim.schedule=constant; unset it"),
        (
            {"schedule": "wsd"},
            "optim.decay=0 leaves optim.schedule=wsd without a decay; set optim.decay, or choose",
        ),
        (
            {"schedule": "cosine", "unit": "tokens"},
            "optim.total=None with optim.schedule=cosine and optim.unit=tokens: the Trainer knows "
            "steps only; set optim.total in tokens",
        ),
        (
            {"schedule": "wsd", "warmup": 4, "decay": 4, "total": 7},
            "optim.warmup=4 and optim.decay=4 are longer together than optim.total=7; shorten them",
        ),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OptimConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "3e-4"}, "optim.lr='3e-4' must be a number, got str"),
        ({"betas": [0.9, 0.95]}, "optim.betas=[0.9, 0.95] must be of type tuple, got list"),
        ({"betas": (0.9, None)}, "optim.betas[1]=None must be a number, got None"),
        ({"warmup": 10.0}, "optim.warmup=10.0 must be an integer, got float"),
    ],
)
def test_an_optimizer_option_of_the_wrong_type_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        OptimConfig(**options)
