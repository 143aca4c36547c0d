"""The router gives the numbers of Olmo-core 3: weights, ids, counts, losses, gradients and the moved bias."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.nn import Router, Routing, balance_loss, z_loss
from lightning_moe.ops import updated_score_bias
from tests.golden.convert import load_golden, router_config

Case = dict[str, Any]

# All 113 stored cases are used; none needs an option that `RouterConfig` lacks (document pools, "EMO", among them).
CASES: list[Case] = load_golden("router_cases.pt")
# Jitter follows the random numbers of the original, so only properties of these two can be compared.
JITTERED = [case for case in CASES if "jitter_eps" in case["config"]]
EXACT = [case for case in CASES if "jitter_eps" not in case["config"]]


def case_id(case: Case) -> str:
    """The options that make this case differ from the others."""
    config = case["config"]
    norm = config.get("normalize_expert_weights")
    flags = {
        f"p{norm}": norm is not None,
        "per_sequence": config.get("lb_loss_granularity") == "instance",
        "bias": config.get("bias_gamma") is not None,
        "groups": "n_group" in config,
        "uniform": "uniform_expert_assignment" in config,
        "jitter": "jitter_eps" in config,
        f"divided_by_{case['div']}": case["div"] is not None,
    }
    chosen = [name for name, is_set in flags.items() if is_set]
    return "-".join([config.get("gating_function", "softmax"), f"k{config['top_k']}", *chosen])


def build_router(case: Case) -> Router:
    config = case["config"]
    router = Router(config["d_model"], config["num_experts"], router_config(config))
    with torch.no_grad():
        router.weight.copy_(case["router_weight"])
    return router.train()


def weighted_aux_loss(case: Case, record: Routing) -> Tensor | None:
    """Balance and z-loss with their weights: sums over tokens, divided by the case's own divisor."""
    config = case["config"]
    if "lb_loss_weight" not in config:
        return None
    divisor = record.num_tokens if case["div"] is None else case["div"]
    scope = "sequence" if config["lb_loss_granularity"] == "instance" else "micro_batch"
    balance = balance_loss([record], scope=scope, reduction="sum")
    z = z_loss([record], reduction="sum")
    return (config["lb_loss_weight"] * balance + config["z_loss_weight"] * z) / divisor


def assert_equal_to_1e6(actual: Tensor, expected: Tensor, *, floor: float = 0.0) -> None:
    """To 1e-6 of the largest entry: a small entry is a sum of large ones, with their rounding."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=max(1e-6 * scale, floor))


def cancels_exactly(case: Case) -> bool:
    """Whether the weights are constant 1, so that their gradient is the rounding of terms of order 1."""
    config = case["config"]
    return config["top_k"] == 1 and config["normalize_expert_weights"] is not None


@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_router_equals_the_original(case: Case) -> None:
    router = build_router(case)
    x = case["x"].clone().requires_grad_()
    weights, ids, record = router(x)
    aux_loss = weighted_aux_loss(case, record)
    ranks = torch.arange(1, weights.shape[-1] + 1)
    ((weights * ranks).sum() + (0 if aux_loss is None else aux_loss)).backward()

    # No scores of these cases tie, so the ids are the same too.
    assert torch.equal(ids, case["indices"])
    assert torch.equal(record.requested_E, case["counts"])
    assert_equal_to_1e6(weights, case["weights"])
    # Where nothing else is left, four roundings per token, spread by the router's weight or by the tokens.
    rounding = 2.0**-22 if cancels_exactly(case) else 0.0
    floor_x = rounding * float(case["router_weight"].abs().max())
    floor_w = rounding * float(case["x"].abs().sum(dim=(0, 1)).max())
    assert_equal_to_1e6(x.grad, case["grad_x"], floor=floor_x)
    assert_equal_to_1e6(router.weight.grad, case["grad_w"].view(8, 32), floor=floor_w)
    assert (aux_loss is None) == (case["aux_loss"] is None)
    if aux_loss is not None:
        assert_equal_to_1e6(aux_loss.detach(), case["aux_loss"])


@pytest.mark.parametrize(
    "case", [case for case in EXACT if case["score_bias"] is not None], ids=case_id
)
def test_selection_bias_after_one_step_equals_the_original(case: Case) -> None:
    router = build_router(case)
    _, _, record = router(case["x"])
    assert router.score_bias is not None
    gamma = case["config"].get("bias_gamma")
    moved = router.score_bias
    if gamma is not None:
        moved = updated_score_bias(router.score_bias, record.requested_E, gamma)
    assert_equal_to_1e6(moved, case["score_bias"])


@pytest.mark.parametrize("case", JITTERED, ids=case_id)
def test_jitter_of_the_stored_size_moves_weights_only_as_far_as_it_may(case: Case) -> None:
    """Each input differs by at most eps, so each logit by at most 2 * eps * sum |x * w| between two draws."""
    torch.manual_seed(0)
    router = build_router(case)
    weights, ids, record = router(case["x"])
    assert weights.shape == ids.shape == case["indices"].shape
    assert bool((ids.diff(dim=-1) != 0).all()), "the two experts of a token are different ones"
    assert int(record.requested_E.sum()) == ids.numel()
    # A softmax score changes by at most a factor exp(2 * change of logits), whatever is chosen; best first.
    change = 2 * case["config"]["jitter_eps"] * (case["x"].abs() @ router.weight.abs().t()).amax(-1)
    assert bool(((weights / case["weights"]).log().abs() <= 2 * change[..., None]).all())
    assert not torch.equal(weights, case["weights"])


@pytest.mark.parametrize("case", JITTERED, ids=case_id)
def test_jitter_is_off_in_evaluation(case: Case) -> None:
    router = build_router(case).eval()
    first, second = router(case["x"])[0], router(case["x"])[0]
    assert torch.equal(first, second)
