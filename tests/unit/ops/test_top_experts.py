"""The choice of experts: the same as a stable descending sort, whatever the scores."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import top_experts
from lightning_moe.ops.top_experts import _top_by_unique_keys, _top_with_repaired_ties

NAN, INF = float("nan"), float("inf")

# Every path of the operator, also those that this machine's device would not take.
PATHS = pytest.mark.parametrize(
    "choose", [top_experts, _top_with_repaired_ties, _top_by_unique_keys]
)


def sorted_choice(scores: Tensor, k: int) -> list[list[int]]:
    """By Python's stable sort, NaN first, then high before low."""

    def key(score: float) -> tuple[bool, float]:
        return (False, 0.0) if math.isnan(score) else (True, -score)

    return [
        sorted(range(len(row)), key=lambda expert: key(row[expert]))[:k] for row in scores.tolist()
    ]


def _rows(kind: str, generator: torch.Generator, num_experts: int) -> Tensor:
    shape = (11, num_experts)
    random = torch.randn(shape, generator=generator)
    if kind == "random":
        return random
    if kind == "ties":
        return torch.randint(-2, 3, shape, generator=generator).float()
    if kind == "equal":
        return torch.full(shape, -1.5)
    values = {
        "zeros": [0.0, -0.0],
        "infinite": [INF, -INF, 1.0],
        "nan": [NAN, -NAN, INF, -INF, 0.0],
    }
    special = torch.tensor(values[kind])
    return special[torch.randint(len(special), shape, generator=generator)]


@PATHS
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "zeros", "infinite", "nan"])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (7, 1), (7, 3), (7, 6), (7, 7), (130, 2)])
def test_choice_equals_a_stable_descending_sort(
    choose: Callable[[Tensor, int], Tensor],
    kind: str,
    num_experts: int,
    k: int,
    generator: torch.Generator,
) -> None:
    scores = _rows(kind, generator, num_experts)
    assert choose(scores, k).tolist() == sorted_choice(scores, k)


def test_choice_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2, 0.7], [3.0, -1.0, 3.0, 3.0]])
    assert top_experts(scores, 3).tolist() == [[1, 3, 2], [0, 2, 3]]


@PATHS
def test_equal_scores_give_the_first_k_experts(choose: Callable[[Tensor, int], Tensor]) -> None:
    assert choose(torch.zeros(2, 8), 5).tolist() == [[0, 1, 2, 3, 4]] * 2


@PATHS
def test_positive_and_negative_zero_tie(choose: Callable[[Tensor, int], Tensor]) -> None:
    assert choose(torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, 1.0]]), 2).tolist() == [
        [0, 1],
        [2, 0],
    ]


@PATHS
def test_ids_are_distinct_and_in_range_for_rows_of_nan(
    choose: Callable[[Tensor, int], Tensor],
) -> None:
    ids = choose(torch.full((3, 5), NAN), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


@PATHS
def test_scores_that_differ_in_the_last_bit_do_not_tie(
    choose: Callable[[Tensor, int], Tensor],
) -> None:
    one = torch.tensor(1.0)
    above = torch.nextafter(one, torch.tensor(2.0))
    scores = torch.stack((one, above, -above, -one))[None]
    assert choose(scores, 4).tolist() == [[1, 0, 3, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types_follow_the_same_order(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    scores = torch.randn(9, 6, generator=generator).to(dtype)
    assert top_experts(scores, 4).tolist() == sorted_choice(scores, 4)


def test_no_tokens_give_no_ids() -> None:
    ids = top_experts(torch.zeros(0, 5), 2)
    assert (ids.shape, ids.dtype) == ((0, 2), torch.int64)


def test_keys_hold_as_many_experts_as_they_promise() -> None:
    scores = torch.zeros(1, 2**16)
    scores[0, -1] = 1.0
    assert _top_by_unique_keys(scores, 3).tolist() == [[2**16 - 1, 0, 1]]


@pytest.mark.parametrize("k", [0, 4])
def test_k_outside_the_experts_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} must be between 1 and the number of experts, 3"):
        top_experts(torch.zeros(2, 3), k)


def test_no_gradient_flows_and_scores_stay_as_they_are(generator: torch.Generator) -> None:
    scores = torch.randint(0, 2, (5, 4), generator=generator).double().requires_grad_()
    before = scores.detach().clone()
    assert not top_experts(scores, 2).requires_grad
    assert torch.equal(scores, before)


def test_choice_works_under_deterministic_algorithms(generator: torch.Generator) -> None:
    scores = torch.randint(0, 2, (6, 5), generator=generator).float()
    torch.use_deterministic_algorithms(True)
    try:
        ids = top_experts(scores, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ids.tolist() == sorted_choice(scores, 3)


def test_operator_keeps_the_rules_of_custom_operators(generator: torch.Generator) -> None:
    scores = torch.randint(0, 3, (4, 5), generator=generator).float()
    torch.library.opcheck(torch.ops.lightning_moe.top_experts.default, (scores, 2))


def test_compiled_choice_equals_the_eager_one(generator: torch.Generator) -> None:
    scores = torch.randint(0, 3, (4, 5), generator=generator).float()
    compiled = torch.compile(
        torch.ops.lightning_moe.top_experts.default, backend="eager", fullgraph=True
    )
    assert compiled(scores, 3).tolist() == sorted_choice(scores, 3)
