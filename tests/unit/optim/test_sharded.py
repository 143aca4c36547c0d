"""Which optimizers may be split, found out by trying them on one small matrix."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_moe.optim.sharded import refuse_unless_elementwise
from tests.kit.optimizers import NormedDescent, SignDescent


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.0),
        lambda p: SignDescent(p, 0.1),
    ],
)
def test_elementwise_optimizers_are_accepted_and_left_untouched(
    make: Callable[[Any], Optimizer],
) -> None:
    parameters = _parameters()
    optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}])
    before = copy.deepcopy(optimizer.state_dict())
    refuse_unless_elementwise(optimizer)
    assert str(optimizer.state_dict()) == str(before)
    assert all((parameter == 1.0).all() for parameter in parameters)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Muon(p[:1]), "Muon could not be tried out on a small matrix"),
        (torch.optim.Adafactor, "Adafactor updates a matrix differently in parts"),
        (torch.optim.LBFGS, "LBFGS could not be tried out on a small matrix"),
        (lambda p: NormedDescent(p, 0.1), "NormedDescent updates a matrix differently in parts"),
    ],
)
def test_other_optimizers_are_refused_with_what_to_do(
    make: Callable[[Any], Optimizer], message: str
) -> None:
    advice = "or set strategy.distributed_optimizer=False"
    with pytest.raises(ValueError, match=message) as caught:
        refuse_unless_elementwise(make(_parameters()))
    assert str(caught.value).endswith(advice)
    with pytest.raises(ValueError, match=message) as caught:
        refuse_unless_elementwise(make(_parameters()), only_masters=True)
    assert f"{advice} and model.moe.fp8.fp8_only=false (" in str(caught.value)


def test_the_trial_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    refuse_unless_elementwise(torch.optim.AdamW(_parameters()))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_first_group_is_no_obstacle() -> None:
    optimizer = torch.optim.AdamW([{"params": []}, {"params": _parameters()}])
    refuse_unless_elementwise(optimizer)


def test_a_trial_that_gives_nan_tells_nothing_and_refuses() -> None:
    with pytest.raises(ValueError, match="SignDescent"):
        refuse_unless_elementwise(SignDescent(_parameters(), math.nan))
