"""Sorting token copies by expert, and adding them up again."""

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import Plan, combine, dot_of_rows, permute, plan_by_expert, reorder
from lightning_moe.ops.permute import sum_of_copies

IDS = torch.tensor([[2, 0], [2, 1], [0, 2]])


def _case(name: str, generator: torch.Generator) -> tuple[Tensor, int]:
    """(ids (T, K), number of experts)."""
    return {
        "random": (torch.rand(7, 4, generator=generator).argsort(dim=-1)[:, :2], 4),
        "no tokens": (torch.zeros(0, 2, dtype=torch.int64), 3),
        "idle experts": (torch.tensor([[1, 4], [4, 1], [1, 4]]), 6),
        "all on one": (torch.full((5, 1), 2), 4),
        "K = E": (torch.arange(3).expand(4, 3), 3),
        "one expert": (torch.zeros(3, 1, dtype=torch.int64), 1),
    }[name]


CASES = pytest.mark.parametrize(
    "name", ["random", "no tokens", "idle experts", "all on one", "K = E", "one expert"]
)


def test_plan_by_hand() -> None:
    plan = plan_by_expert(IDS, 4)
    assert plan.order_N.tolist() == [1, 4, 3, 0, 2, 5]
    assert plan.inverse_TK.tolist() == [[3, 0], [4, 2], [1, 5]]
    assert plan.counts_E.tolist() == [2, 1, 3, 0]


@CASES
def test_plan_groups_copies_by_expert_and_keeps_their_order(
    name: str, generator: torch.Generator
) -> None:
    ids, num_experts = _case(name, generator)
    plan = plan_by_expert(ids, num_experts)
    flat = ids.flatten().tolist()
    expected = [n for expert in range(num_experts) for n in range(len(flat)) if flat[n] == expert]
    assert plan.order_N.tolist() == expected
    assert plan.counts_E.tolist() == [flat.count(expert) for expert in range(num_experts)]
    assert plan.order_N[plan.inverse_TK.flatten()].tolist() == list(range(len(flat)))
    assert plan.inverse_TK.shape == ids.shape


@pytest.mark.parametrize("num_experts", [2**15 - 1, 2**15, 2**16 + 3])
def test_plan_serves_more_experts_than_its_narrow_keys_hold(num_experts: int) -> None:
    plan = plan_by_expert(torch.tensor([[num_experts - 1, 0], [1, num_experts - 1]]), num_experts)
    assert plan.order_N.tolist() == [1, 2, 0, 3]
    assert plan.counts_E[[0, 1, num_experts - 1]].tolist() == [1, 1, 2]
    assert int(plan.counts_E.sum()) == 4


def test_no_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        plan_by_expert(IDS, 0)


@pytest.mark.parametrize("num_experts", [4, 2**15])
@pytest.mark.parametrize("wrong", [-1, 4, 2**16 + 1, -(2**40)])
def test_an_id_that_is_no_experts_is_refused(wrong: int, num_experts: int) -> None:
    ids = torch.tensor([[0, 1], [wrong * num_experts // 4, 2]])
    with pytest.raises(RuntimeError, match=rf"id of an expert is outside of \[0, {num_experts}\)"):
        plan_by_expert(ids, num_experts)


def test_permuted_rows_by_hand() -> None:
    x = torch.tensor([[10.0, 11.0, 12.0], [20.0, 21.0, 22.0], [30.0, 31.0, 32.0]])
    rows = permute(x, plan_by_expert(IDS, 4))
    assert rows[:, 0].tolist() == [10, 30, 20, 10, 20, 30]
    assert torch.equal(rows[0], x[0])


def test_combined_rows_by_hand() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    weights = torch.tensor([[1.0, 0.5], [0.25, 3.0], [2.0, 0.125]])
    y = combine(rows, weights, plan_by_expert(IDS, 4))
    assert y.flatten().tolist() == [8 + 0.5, 4 + 12, 4 + 4]


@CASES
def test_combining_permuted_rows_multiplies_by_the_sum_of_weights(
    name: str, generator: torch.Generator
) -> None:
    ids, num_experts = _case(name, generator)
    plan = plan_by_expert(ids, num_experts)
    x = torch.randn(len(ids), 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        combine(permute(x, plan), weights, plan), x * weights.sum(dim=-1, keepdim=True)
    )


@CASES
def test_gradients_of_permute_and_combine(name: str, generator: torch.Generator) -> None:
    ids, num_experts = _case(name, generator)
    plan = plan_by_expert(ids, num_experts)
    x = torch.randn(len(ids), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(ids.numel(), 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, plan), (x,))
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, plan), (rows, weights))


def _plain(x: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The same with stock indexing, whose backward is autograd's own."""
    rows = x[plan.order_N // weights.shape[1]]
    return (rows[plan.inverse_TK] * weights[:, :, None].to(rows.dtype)).sum(dim=1)


def test_gradients_equal_those_of_plain_indexing(generator: torch.Generator) -> None:
    ids, num_experts = _case("random", generator)
    plan = plan_by_expert(ids, num_experts)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    upstream = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    leaves = [[t.clone().requires_grad_() for t in (x, weights)] for _ in range(2)]
    combine(permute(leaves[0][0], plan), leaves[0][1], plan).backward(upstream)
    _plain(*leaves[1], plan).backward(upstream)
    for ours, plain in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


def test_expanded_gradients_are_taken(generator: torch.Generator) -> None:
    ids, num_experts = _case("random", generator)
    plan = plan_by_expert(ids, num_experts)
    x = torch.randn(7, 5, generator=generator, requires_grad=True)
    rows = permute(x, plan)
    rows.sum().backward()
    assert torch.equal(x.grad, torch.full((7, 5), 2.0))


def test_low_precision_rows_are_added_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16: one rounding at the end gives 258, a rounding per addition 256.
    plan = plan_by_expert(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    y = combine(rows, torch.ones(1, 3), plan)
    assert (y.dtype, y.item()) == (torch.bfloat16, 258.0)
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute(x, plan).backward(rows)
    assert x.grad.item() == 258.0


def test_float32_weights_of_low_precision_rows_are_not_rounded_first() -> None:
    plan = plan_by_expert(torch.tensor([[0, 1]]), 2)
    rows = torch.tensor([[256.0], [-256.0]], dtype=torch.bfloat16)
    y = combine(rows, torch.tensor([[1 + 2**-10, 1.0]]), plan)
    assert y.item() == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_and_gradients_keep_their_types(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    plan = plan_by_expert(IDS, 4)
    rows = torch.randn(6, 5, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(3, 2, generator=generator).requires_grad_()
    y = combine(rows, weights, plan)
    y.sum().backward()
    assert (y.dtype, rows.grad.dtype, weights.grad.dtype) == (dtype, dtype, torch.float32)


def test_reordered_rows_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [0.0, 0.5, 0.25]])
    order = torch.tensor([2, 3, 1, 0])
    assert torch.equal(reorder(rows, order, order.argsort()), rows[[2, 3, 1, 0]])


@pytest.mark.parametrize("num_rows", [0, 5])
def test_reordering_back_is_the_identity_with_its_gradient(
    num_rows: int, generator: torch.Generator
) -> None:
    rows = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(num_rows, generator=generator)
    inverse = order.argsort()
    assert torch.equal(reorder(reorder(rows, order, inverse), inverse, order), rows)
    assert torch.autograd.gradcheck(lambda rows: reorder(rows, order, inverse), (rows,))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dot_products_of_rows_are_at_least_float32(
    num_rows: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    left, right = (torch.randn(num_rows, 3, generator=generator).to(dtype) for _ in range(2))
    found = dot_of_rows(left, right)
    expected = (left.double() * right.double()).sum(dim=-1)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_sum_of_copies_is_the_gradient_of_permute(generator: torch.Generator) -> None:
    plan = plan_by_expert(IDS, 4)
    rows_ND = torch.arange(12.0).view(6, 2)
    # Rows of tokens 0, 1 and 2: see the plan by hand.
    expected = [rows_ND[[3, 0]], rows_ND[[4, 2]], rows_ND[[1, 5]]]
    assert torch.equal(sum_of_copies(rows_ND, plan), torch.stack([e.sum(dim=0) for e in expected]))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x_TD = torch.randn(3, 5, generator=generator).to(dtype).requires_grad_()
        gradient = torch.randn(6, 5, generator=generator).to(dtype)
        permute(x_TD, plan).backward(gradient)
        assert torch.equal(sum_of_copies(gradient, plan), x_TD.grad)


def test_bytes_are_permuted_as_they_are() -> None:
    plan = plan_by_expert(IDS, 4)
    bytes_TD = torch.tensor([[0, 255], [1, 128], [2, 3]], dtype=torch.uint8)
    rows_ND = permute(bytes_TD, plan)
    assert rows_ND.dtype == torch.uint8
    assert torch.equal(rows_ND, bytes_TD[[0, 2, 1, 0, 1, 2]])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(reorder(bytes_TD, order, order.argsort()), bytes_TD[order])
