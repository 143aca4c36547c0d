"""What a record tells of each token while the router's trace is on, and that it changes nothing else."""

import dataclasses
import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE, Router, TokenRoutes
from lightning_moe.nn.recompute import recomputed
from tests.kit.randomized import randomized

# Logits of three tokens for four experts; the router's weight is the identity.
LOGITS = torch.tensor([[3.0, 1.0, 0.5, -2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 2.0, 1.5, 4.0]]).double()


def _traced(
    config: RouterConfig, x: Tensor = LOGITS, *, bias: list[float] | None = None
) -> TokenRoutes:
    router = Router(4, 4, config).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        if bias is not None:
            router.score_bias.copy_(torch.tensor(bias))
    router.trace = True
    return router(x)[2].tokens


def test_a_record_tells_nothing_of_tokens_unless_asked() -> None:
    router = Router(4, 4, RouterConfig())
    assert router.trace is False
    assert router(LOGITS.float())[2].tokens is None


def test_ids_and_weights_are_those_of_the_call_without_gradient(generator: torch.Generator) -> None:
    router = randomized(Router(5, 6, RouterConfig(top_k=2)), generator)
    router.trace = True
    weights, ids, record = router(torch.randn(3, 4, 5, generator=generator, requires_grad=True))
    assert torch.equal(record.tokens.ids_TK, ids.flatten(0, 1))
    assert torch.equal(record.tokens.weights_TK, weights.flatten(0, 1))
    tensors = [leaf for leaf in pytree.tree_leaves(record.tokens) if isinstance(leaf, Tensor)]
    assert len(tensors) == 5
    assert not any(tensor.requires_grad for tensor in tensors)


def test_the_margin_is_that_of_the_last_chosen_score_over_the_best_left_out() -> None:
    logits_gate = _traced(RouterConfig(top_k=2, gating_function="topk_softmax"))
    torch.testing.assert_close(logits_gate.margin_T, torch.tensor([0.5, 0.0, 0.5]).double())
    softmax = _traced(RouterConfig(top_k=1)).margin_T
    total = sum(math.exp(z) for z in (3.0, 1.0, 0.5, -2.0))
    assert softmax[0].item() == pytest.approx((math.exp(3.0) - math.exp(1.0)) / total, rel=1e-12)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def test_the_margin_sees_the_selection_bias() -> None:
    config = RouterConfig(top_k=2, gating_function="sigmoid", score_correction_bias=True)
    margins = _traced(config, bias=[0.0, 0.0, 2.0, 0.0]).margin_T.tolist()
    # The third expert is always chosen; the margin is that of the first over the second of the others.
    by_hand = [_sigmoid(3.0) - _sigmoid(1.0), 0.0, _sigmoid(4.0) - _sigmoid(2.0)]
    assert margins == pytest.approx(by_hand, abs=1e-7)  # the bias is float32


def test_the_margin_stays_inside_the_groups_that_were_kept() -> None:
    gate = {"gating_function": "sigmoid", "n_group": 2, "topk_group": 1}
    # Groups {0, 1} and {2, 3}: the first wins twice, then the second.
    margins = _traced(RouterConfig(top_k=1, **gate)).margin_T.tolist()
    by_hand = [_sigmoid(3.0) - _sigmoid(1.0), 0.0, _sigmoid(4.0) - _sigmoid(1.5)]
    assert margins == pytest.approx(by_hand, abs=1e-12)
    assert _traced(RouterConfig(top_k=2, **gate)).margin_T.tolist() == [math.inf] * 3


def test_the_margin_is_infinite_where_every_expert_is_chosen() -> None:
    assert _traced(RouterConfig(top_k=4)).margin_T.tolist() == [math.inf] * 3


def test_the_margin_is_negative_where_scores_did_not_decide() -> None:
    config = RouterConfig(top_k=1, gating_function="topk_softmax", uniform_expert_assignment=True)
    # Experts 0, 1, 2 in turn: 3 against 1, 0 against 0, 1.5 against 4.
    torch.testing.assert_close(_traced(config).margin_T, torch.tensor([2.0, 0.0, -2.5]).double())


@pytest.mark.parametrize("gating", ["softmax", "topk_softmax", "sigmoid"])
def test_the_entropy_is_that_of_all_scores_made_to_add_up_to_one(gating: str) -> None:
    config = RouterConfig(top_k=2, gating_function=gating, sigmoid_stability_epsilon=0.0)
    for got, row in zip(_traced(config).entropy_T.tolist(), LOGITS.tolist(), strict=True):
        scores = [1 / (1 + math.exp(-z)) if gating == "sigmoid" else math.exp(z) for z in row]
        shares = [score / sum(scores) for score in scores]
        assert got == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-12)


def test_padding_has_its_row_and_is_marked() -> None:
    router = Router(4, 4, RouterConfig(top_k=2)).double()
    router.trace = True
    plain, padded = router(LOGITS)[2], router(LOGITS, torch.tensor([True, False, True]))[2]
    assert plain.tokens.valid_T.tolist() == [True] * 3
    assert padded.tokens.valid_T.tolist() == [True, False, True]
    for field in ("ids_TK", "weights_TK", "margin_T", "entropy_T"):
        assert torch.equal(getattr(padded.tokens, field), getattr(plain.tokens, field))


@pytest.mark.parametrize(
    "options",
    [
        {"gating_function": "softmax", "bias_gamma": 0.1},
        {"gating_function": "topk_softmax"},
        {"gating_function": "sigmoid", "n_group": 3, "topk_group": 2},
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_tracing_changes_no_result_exactly(
    options: dict[str, object], recompute: bool, generator: torch.Generator
) -> None:
    router = RouterConfig(top_k=2, **options)
    layer = randomized(MoE(5, MoEConfig(num_experts=6, hidden_size=4, router=router)), generator)
    x = torch.randn(2, 4, 5, generator=generator)
    results = []
    for trace in (False, True):
        layer.router.trace = trace
        y, record = recomputed(layer, x) if recompute else layer(x)
        loss = y.square().sum() + (record.score_sums_E * torch.arange(6)).sum()
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        assert (record.tokens is not None) is trace
        results.append(
            [y, *gradients, *pytree.tree_leaves(dataclasses.replace(record, tokens=None))]
        )
    for plain, traced in zip(*results, strict=True):
        assert plain is traced is None or torch.equal(plain, traced)


def test_a_layer_keeps_nothing_of_what_it_told(generator: torch.Generator) -> None:
    layer = randomized(MoE(5, MoEConfig(num_experts=6, router=RouterConfig(top_k=2))), generator)
    layer.router.trace = True
    told = []
    for _ in range(3):
        _, record = layer(torch.randn(7, 5, generator=generator))
        told += [weakref.ref(record.tokens.margin_T), weakref.ref(record.score_sums_E)]
    assert [ref() is None for ref in told] == [True] * 4 + [False] * 2
    del record
    assert [ref() for ref in told] == [None] * 6
