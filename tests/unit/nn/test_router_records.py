"""What counts in a routing record: valid tokens, per sequence, and nothing twice."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_moe.config import BalanceScope, RouterConfig
from lightning_moe.nn import Router, Routing, balance_loss, z_loss
from lightning_moe.ops import balance_loss as ops_balance_loss
from tests.kit import reference
from tests.kit.randomized import randomized

FIELDS = ("requested_E", "kept_E", "score_sums_E", "logz_squared", "num_tokens")
BY_SEQUENCE = ("requested_BE", "score_sums_BE", "num_tokens_B")


def _case(
    generator: torch.Generator, gating: str = "softmax", scope: str = "sequence"
) -> tuple[Router, Tensor]:
    """A router of six experts, and tokens (3, 4, 5)."""
    config = RouterConfig(
        top_k=2, gating_function=gating, lb_loss_scope=scope, z_loss_weight=0.1, lb_loss_weight=0.1
    )
    router = randomized(Router(5, 6, config), generator).double()
    return router, torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)


def _assert_equal(ours: Routing, expected: Routing, fields: tuple[str, ...]) -> None:
    for field in fields:
        torch.testing.assert_close(getattr(ours, field), getattr(expected, field))


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_invalid_tokens_count_nowhere(gating: str, generator: torch.Generator) -> None:
    router, x = _case(generator, gating)
    valid = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    record = router(x, valid)[2]
    _assert_equal(record, router(x[valid])[2], FIELDS)
    alone = [router(x[:1])[2], router(x[1:2, :2])[2]]
    assert record.num_tokens_B.tolist() == [4, 2, 0]
    assert record.requested_BE[2].tolist() == [0] * 6
    for row, single in enumerate(alone):
        assert record.requested_BE[row].tolist() == single.requested_E.tolist()
        torch.testing.assert_close(record.score_sums_BE[row], single.score_sums_E)
    torch.testing.assert_close(record.score_sums_BE[2], torch.zeros(6).double())


def test_invalid_tokens_are_routed_all_the_same_exactly(generator: torch.Generator) -> None:
    router, x = _case(generator)
    padded, plain = router(x, torch.zeros(3, 4, dtype=torch.bool)), router(x)
    assert torch.equal(padded[0], plain[0])
    assert torch.equal(padded[1], plain[1])


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_a_call_of_padding_alone_gives_zeros_and_finite_losses(
    gating: str, generator: torch.Generator
) -> None:
    router, x = _case(generator, gating)
    record = router(x, torch.zeros(3, 4, dtype=torch.bool))[2]
    for field in (*FIELDS, *BY_SEQUENCE):
        assert torch.equal(getattr(record, field), torch.zeros_like(getattr(record, field)))
    for scope, reduction in product(("sequence", "micro_batch"), ("sum", "mean")):
        loss = balance_loss([record], scope=scope, reduction=reduction)
        loss = loss + z_loss([record], reduction=reduction)
        assert loss.item() == 0
        gradients = torch.autograd.grad(loss, router.weight, retain_graph=True)
        assert torch.equal(gradients[0], torch.zeros(6, 5).double())


def test_padding_does_not_pull_on_the_router(generator: torch.Generator) -> None:
    router, x = _case(generator)
    valid = torch.rand(3, 4, generator=generator) < 0.5
    gradients = []
    for args in ((x, valid), (x[valid],)):
        record = router(*args)[2]
        loss = balance_loss([record]) + z_loss([record])
        gradients += torch.autograd.grad(loss, router.weight)
    torch.testing.assert_close(*gradients)


def test_sequence_scope_adds_up_single_sequences(generator: torch.Generator) -> None:
    router, x = _case(generator)
    together = balance_loss([router(x)[2]], scope="sequence", reduction="sum")
    one_by_one = sum(
        4 * reference.balance_loss(routed.ids, routed.shares)
        for routed in (reference.router(tokens, router.weight, router.config) for tokens in x)
    )
    torch.testing.assert_close(together, one_by_one)
    parts = [router(x[:1])[2], router(x[1:])[2]]
    split = sum(balance_loss([part], scope="sequence", reduction="sum") for part in parts)
    torch.testing.assert_close(together, split)


def test_sequence_records_add_up_to_those_of_the_call(generator: torch.Generator) -> None:
    router, x = _case(generator)
    record = router(x)[2]
    assert record.requested_BE.sum(dim=0).tolist() == record.requested_E.tolist()
    torch.testing.assert_close(record.score_sums_BE.sum(dim=0), record.score_sums_E)
    assert record.num_tokens_B.tolist() == [4, 4, 4]


def test_flat_tokens_are_one_sequence(generator: torch.Generator) -> None:
    router, x = _case(generator)
    record = router(x.flatten(0, 1))[2]
    assert record.requested_BE.tolist() == [record.requested_E.tolist()]
    assert record.num_tokens_B.tolist() == [12]


def test_micro_batch_scope_keeps_nothing_per_sequence(generator: torch.Generator) -> None:
    router, x = _case(generator, scope="micro_batch")
    record = router(x)[2]
    assert [getattr(record, field) for field in BY_SEQUENCE] == [None, None, None]


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_score_sums_add_up_to_the_tokens(gating: str, generator: torch.Generator) -> None:
    router, x = _case(generator, gating)
    torch.testing.assert_close(router(x)[2].score_sums_E.sum(), torch.tensor(12.0).double())


def test_sigmoid_scores_that_all_vanish_still_add_up_to_1() -> None:
    router = Router(1, 3, RouterConfig(gating_function="sigmoid", sigmoid_stability_epsilon=0.0))
    with torch.no_grad():
        router.weight.fill_(-1e4)
    record = router(torch.ones(2, 1))[2]
    balance_loss([record]).backward()
    # Two tokens, whose scores add up to 1 over three equal experts.
    torch.testing.assert_close(record.score_sums_E, torch.full((3,), 2 / 3))
    assert router.weight.grad.isfinite().all()


def test_z_loss_has_gradient_only_where_its_weight_is_set(generator: torch.Generator) -> None:
    x = torch.randn(4, 5, generator=generator)
    for weight, wanted in ((None, False), (0.0, False), (1e-3, True)):
        router = Router(5, 3, RouterConfig(z_loss_weight=weight))
        assert router(x)[2].logz_squared.requires_grad is wanted


def test_without_gradients_a_record_holds_no_graph(generator: torch.Generator) -> None:
    router, x = _case(generator)
    with torch.no_grad():
        record = router(x)[2]
    assert all(getattr(record, field).grad_fn is None for field in (*FIELDS, *BY_SEQUENCE))
    assert balance_loss([router(x)[2]]).requires_grad


def test_the_balance_loss_knows_every_scope_and_no_other(generator: torch.Generator) -> None:
    router, x = _case(generator)
    record = router(x)[2]
    losses = {scope: balance_loss([record], scope=scope) for scope in get_args(BalanceScope)}
    assert torch.equal(losses.pop("sequence"), ops_balance_loss([record], per_sequence=True))
    assert all(torch.equal(loss, ops_balance_loss([record])) for loss in losses.values())


@pytest.mark.usefixtures("shape_checker_off")
def test_a_scope_that_does_not_exist_is_refused(generator: torch.Generator) -> None:
    router, x = _case(generator)
    with pytest.raises(ValueError, match="scope='token' must be one of sequence, micro_batch"):
        balance_loss([router(x)[2]], scope="token")
