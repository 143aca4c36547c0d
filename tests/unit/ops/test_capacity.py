"""Slots by hand, dropped copies as zeros, and gradients as autograd has them for a dense formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.ops.capacity import (
    CapacityPlan,
    combine_slots,
    fill_slots,
    plan_with_capacity,
    slots_per_expert,
    sum_of_slots,
)

IDS_TK = torch.tensor([[0, 2], [0, 1], [2, 0], [0, 2], [2, 1]])
WEIGHTS_TK = torch.tensor([[0.2, 0.9], [0.5, 0.5], [0.1, 0.7], [0.5, 0.3], [0.8, 0.6]])
"""Copies of expert 0: tokens 0, 1, 2, 3. Of expert 1: tokens 1, 4. Of expert 2: tokens 0, 2, 3, 4."""


def _plan(capacity: int, overflow: str = "position", *, ids: Tensor = IDS_TK) -> CapacityPlan:
    return plan_with_capacity(ids, WEIGHTS_TK, 3, capacity, overflow)


def _tokens_in_slots(plan: CapacityPlan, capacity: int) -> list[list[int]]:
    """Token numbers in each expert's slots, without the empty ones."""
    copies = plan.copy_R.view(-1, capacity)
    return [[copy // 2 for copy in expert if copy < IDS_TK.numel()] for expert in copies.tolist()]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "expected"),
    [
        (64, 2, 8, 1.0, 16),  # even share 16
        (64, 2, 8, 1.25, 24),  # 20, up to 24
        (60, 1, 7, 1.0, 16),  # 8.57, up to 9, up to 16
        (56, 1, 7, 1.0, 8),  # 8 exactly
        (56, 1, 7, 1.01, 16),  # 8.08, up to 9, up to 16
        (1, 1, 64, 1.0, 8),  # never below one multiple
        (0, 2, 8, 1.25, 8),
        (100, 2, 4, 0.1, 8),  # 5
        (4096, 8, 64, 1.25, 640),
    ],
)
def test_slots_are_the_even_share_times_the_factor_rounded_up_to_eight(
    tokens: int, top_k: int, experts: int, factor: float, expected: int
) -> None:
    assert slots_per_expert(tokens, top_k, experts, factor) == expected


def test_earlier_tokens_keep_their_slots_by_position() -> None:
    plan = _plan(2)
    assert _tokens_in_slots(plan, 2) == [[0, 1], [1, 4], [0, 2]]
    assert plan.kept_E.tolist() == [2, 2, 2]
    dropped = plan.copy_R.numel()
    assert plan.slot_TK.tolist() == [[0, 4], [1, 2], [5, dropped], [dropped] * 2, [dropped, 3]]


def test_larger_weights_keep_their_slots_and_ties_go_to_the_earlier_token() -> None:
    # Expert 0: weights 0.2, 0.5, 0.7, 0.5 of tokens 0 to 3; expert 2: 0.9, 0.1, 0.3, 0.8 of tokens 0, 2, 3, 4.
    plan = _plan(2, "weight")
    assert _tokens_in_slots(plan, 2) == [[2, 1], [4, 1], [0, 4]]
    assert plan.kept_E.tolist() == [2, 2, 2]


def test_with_room_for_all_nothing_is_dropped_and_empty_slots_name_no_copy() -> None:
    plan = _plan(5)
    assert plan.kept_E.tolist() == [4, 2, 4]
    assert (plan.copy_R == IDS_TK.numel()).sum().item() == 15 - 10
    assert plan.slot_TK.max().item() < 15


def test_all_copies_on_one_expert_fill_its_slots_only() -> None:
    plan = _plan(3, ids=torch.ones(5, 2, dtype=torch.int64))
    assert plan.kept_E.tolist() == [0, 3, 0]
    assert plan.copy_R.tolist() == [10] * 3 + [0, 1, 2] + [10] * 3


@pytest.mark.parametrize("overflow", ["position", "weight"])
def test_no_tokens_fill_no_slot(overflow: str) -> None:
    plan = plan_with_capacity(
        torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), 3, 8, overflow
    )
    assert plan.kept_E.tolist() == [0, 0, 0]
    x_TD = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    rows_RD = fill_slots(x_TD, plan)
    assert rows_RD.shape == (24, 4)
    assert not rows_RD.any()
    combine_slots(rows_RD, torch.zeros(0, 2), plan).sum().backward()
    assert x_TD.grad is not None


@pytest.mark.parametrize("overflow", ["position", "weight"])
@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
def test_slots_and_copies_point_at_each_other(capacity: int, overflow: str) -> None:
    plan = _plan(capacity, overflow)
    kept = 0
    for copy, slot in enumerate(plan.slot_TK.flatten().tolist()):
        if slot < plan.copy_R.numel():
            kept += 1
            assert plan.copy_R[slot].item() == copy
            assert slot // capacity == IDS_TK.flatten()[copy].item()
    assert kept == plan.kept_E.sum().item()
    assert kept == (plan.copy_R < IDS_TK.numel()).sum().item()


def _dense(x_TD: Tensor, weights_TK: Tensor, scale_E: Tensor, kept_TK: Tensor) -> Tensor:
    """The masked formula: sum over kept copies of weight * scale(expert) * x, no slot in sight."""
    factors_T = (weights_TK * kept_TK * scale_E[IDS_TK]).sum(dim=1)
    return factors_T[:, None] * x_TD


def _through_slots(x_TD: Tensor, weights_TK: Tensor, scale_E: Tensor, plan: CapacityPlan) -> Tensor:
    rows_RD = fill_slots(x_TD, plan)
    rows_RD = rows_RD * scale_E.repeat_interleave(len(rows_RD) // 3)[:, None]
    return combine_slots(rows_RD, weights_TK, plan)


@pytest.mark.parametrize("overflow", ["position", "weight"])
@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_output_and_gradients_equal_the_dense_masked_formula(
    capacity: int, overflow: str, generator: torch.Generator
) -> None:
    plan = _plan(capacity, overflow)
    kept_TK = (plan.slot_TK < plan.copy_R.numel()).double()
    leaves = [
        torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True),
        WEIGHTS_TK.double().requires_grad_(),
        torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True),
    ]
    mix = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    got = _through_slots(*leaves, plan)
    wanted = _dense(*leaves, kept_TK)
    torch.testing.assert_close(got, wanted)
    ours = torch.autograd.grad((got * mix).sum(), leaves)
    theirs = torch.autograd.grad((wanted * mix).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_token_without_any_slot_is_zero_and_other_weights_stay() -> None:
    plan = _plan(2)
    y_TD = combine_slots(fill_slots(torch.ones(5, 1), plan), WEIGHTS_TK, plan)
    # Token 2 keeps its copy of expert 2 only, token 3 none, token 4 its copy of expert 1 only.
    torch.testing.assert_close(y_TD[:, 0], torch.tensor([1.1, 1.0, 0.1, 0.0, 0.6]))


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_gradcheck_in_float64(capacity: int, generator: torch.Generator) -> None:
    plan = _plan(capacity)
    x_TD = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: fill_slots(x, plan), (x_TD,))
    rows_RD = torch.randn(
        3 * capacity, 3, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weights_TK = WEIGHTS_TK.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda rows, weights: combine_slots(rows, weights, plan), (rows_RD, weights_TK)
    )


def test_what_stands_in_an_empty_slot_does_not_leak_forward_or_backward() -> None:
    plan = _plan(5)
    empty_R = plan.copy_R == IDS_TK.numel()
    rows_RD = torch.ones(15, 2, dtype=torch.float64)
    rows_RD[empty_R] = math.nan
    rows_RD.requires_grad_()
    weights_TK = WEIGHTS_TK.double().requires_grad_()
    y_TD = combine_slots(rows_RD, weights_TK, plan)
    y_TD.sum().backward()
    assert y_TD.isfinite().all()
    assert weights_TK.grad.isfinite().all()
    assert not rows_RD.grad[empty_R].any()


def test_nan_gradients_of_empty_slots_do_not_reach_tokens() -> None:
    plan = _plan(5)
    x_TD = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    incoming_RD = torch.ones(15, 2, dtype=torch.float64)
    incoming_RD[plan.copy_R == IDS_TK.numel()] = math.nan
    fill_slots(x_TD, plan).backward(incoming_RD)
    assert x_TD.grad.tolist() == [[2.0, 2.0]] * 5


def test_a_nan_token_whose_copies_are_dropped_touches_no_other() -> None:
    plan = _plan(2)
    x_TD = torch.ones(5, 2, dtype=torch.float64)
    x_TD[3] = math.nan
    y_TD = combine_slots(fill_slots(x_TD, plan), WEIGHTS_TK.double(), plan)
    assert y_TD.isfinite().all()


def test_a_nan_in_the_last_token_or_slot_does_not_stand_in_for_what_is_missing() -> None:
    """Where an index says "none", the last row is near at hand."""
    plan = _plan(5)
    x_TD = torch.ones(5, 2, dtype=torch.float64)
    x_TD[-1] = math.nan
    rows_RD = fill_slots(x_TD, plan)
    empty_R = plan.copy_R == IDS_TK.numel()
    assert empty_R[-1]
    assert not rows_RD[empty_R].any()
    few = plan_with_capacity(IDS_TK.clamp(max=1), WEIGHTS_TK, 3, 2, "position")
    rows_RD = torch.ones(6, 2, dtype=torch.float64)
    rows_RD[-1] = math.nan
    y_TD = combine_slots(rows_RD, WEIGHTS_TK.double(), few)
    assert (few.slot_TK == 6).any()
    assert y_TD.isfinite().all()


def test_a_nan_token_stays_in_its_own_output(generator: torch.Generator) -> None:
    plan = _plan(5)
    x_TD = torch.randn(5, 2, generator=generator)
    x_TD[1] = math.nan
    y_TD = combine_slots(fill_slots(x_TD, plan), WEIGHTS_TK, plan)
    assert y_TD.isnan().any(dim=1).tolist() == [False, True, False, False, False]


def test_low_precision_rows_are_summed_in_float32() -> None:
    """256 + 1 + 1 in bfloat16 steps would stay 256."""
    ids_TK = torch.tensor([[0, 1, 2]])
    plan = plan_with_capacity(ids_TK, torch.ones(1, 3), 3, 1, "position")
    rows_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert combine_slots(rows_RD, torch.ones(1, 3), plan).item() == 258.0


def test_sum_of_slots_is_the_gradient_of_filling_them(generator: torch.Generator) -> None:
    plan = _plan(2)
    rows_RD = torch.arange(12.0).view(6, 2)
    # Slots 0 and 4, 1 and 2, 5, none, 3: those of the plan by position.
    expected = [rows_RD[slots].sum(dim=0) for slots in ([0, 4], [1, 2], [5], [], [3])]
    assert torch.equal(sum_of_slots(rows_RD, plan), torch.stack(expected))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x_TD = torch.randn(5, 3, generator=generator).to(dtype).requires_grad_()
        gradient = torch.randn(6, 3, generator=generator).to(dtype)
        fill_slots(x_TD, plan).backward(gradient)
        assert torch.equal(sum_of_slots(gradient, plan), x_TD.grad)


def test_slots_take_bytes_as_they_are_and_zeros_where_they_are_empty() -> None:
    bytes_TD = torch.arange(251, 256, dtype=torch.uint8).view(5, 1)
    rows_RD = fill_slots(bytes_TD, _plan(3))
    assert rows_RD.dtype == torch.uint8
    # Tokens 0, 1, 2 of expert 0, tokens 1 and 4 of expert 1 and no third, tokens 0, 2, 3 of expert 2.
    assert rows_RD.flatten().tolist() == [251, 252, 253, 252, 255, 0, 251, 253, 254]


@pytest.mark.parametrize("wrong", [-1, 3, 99])
@pytest.mark.parametrize("overflow", ["position", "weight"])
def test_an_id_that_is_no_experts_gets_no_slot_but_an_error(wrong: int, overflow: Any) -> None:
    ids = torch.tensor([[0, 1], [wrong, 2]])
    with pytest.raises(RuntimeError, match=r"id of an expert is outside of \[0, 3\)"):
        plan_with_capacity(ids, torch.ones(2, 2), 3, 8, overflow)
