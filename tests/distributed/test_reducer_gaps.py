"""Parameters without a gradient: on some ranks, in some micro-batches, frozen for a while, or thrown away."""

import pytest
import torch
from torch import nn

from tests.kit.ranks import run_ranks
from tests.kit.reducer_runs import Setup


def _partly_unused(rank: int, world: int, split: bool) -> None:
    """`sometimes` has a gradient on rank 1 only, `never` on none."""
    module = nn.ParameterDict(
        {name: torch.ones(4096, dtype=torch.float64) for name in ("always", "sometimes", "never")}
    )
    setup = Setup(module, world, 1, split=split)
    for _ in range(2):
        setup.zero_grad()
        loss = module["always"].sum()
        if rank == 1:
            loss = loss + 3 * module["sometimes"].sum()
        setup.backward(loss)
        found = {name: gradient for name, gradient, _ in setup.gradients()}
        assert found["never"] is None
        assert found["always"].unique().tolist() == [1.0]
        assert found["sometimes"].unique().tolist() == [1.5]


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_missing_on_one_rank_counts_as_zero_and_on_all_stays_none(split: bool) -> None:
    run_ranks(_partly_unused, 2, split)


def _only_in_an_earlier_micro_batch(rank: int, world: int, split: bool) -> None:
    module = nn.ParameterDict({name: torch.ones(4096) for name in ("early", "late")})
    setup = Setup(module, world, 1, split=split)
    setup.backward((rank + 1.0) * module["early"].sum(), reduce=False)
    setup.backward(module["late"].sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["early"].unique().tolist() == [1.5]
    assert found["late"].unique().tolist() == [1.0]


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_of_an_earlier_micro_batch_only_is_not_lost(split: bool) -> None:
    run_ranks(_only_in_an_earlier_micro_batch, 2, split)


def _unfrozen(rank: int, world: int) -> None:
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(3)})
    module["a"].requires_grad_(False)
    setup = Setup(module, world, 1)
    module["a"].requires_grad_()
    setup.backward(module["a"].sum() + module["b"].sum())


def test_a_parameter_unfrozen_after_the_start_is_refused_not_left_unreduced() -> None:
    with pytest.raises(RuntimeError, match="parameter a was frozen when fit began"):
        run_ranks(_unfrozen, 2)


def _discarded(rank: int, world: int, dtype: torch.dtype, split: bool) -> None:
    """Two micro-batches are thrown away by `zero_grad`, then one counts."""
    module = nn.ParameterDict({name: torch.zeros(4096, dtype=dtype) for name in ("w", "v")})
    small = module["small"] = nn.Parameter(torch.zeros(3, dtype=dtype))
    setup = Setup(module, world, 1, split=split)
    setup.backward(7 * (module["w"].sum() + small.sum()), reduce=False)
    setup.backward(7 * module["v"].sum(), reduce=False)
    setup.zero_grad()
    setup.backward(module["w"].sum() + small.sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["w"].unique().tolist() == found["small"].unique().tolist() == [1.0]
    assert found["v"] is None


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_grad_discards_what_was_accumulated(dtype: torch.dtype, split: bool) -> None:
    run_ranks(_discarded, 2, dtype, split)


def _toggled(rank: int, world: int) -> None:
    """The optimizer's parameter is frozen for one backward: the model's keeps what it had."""
    module = nn.ParameterDict({name: torch.zeros(4096) for name in ("w", "v")})
    setup = Setup(module, world, 1, split=True)
    assert setup.sharded is not None
    setup.backward(2 * module["w"].sum(), reduce=False)
    setup.sharded.targets["w"].requires_grad_(False)
    setup.backward(5 * module["w"].sum() + 3 * module["v"].sum(), reduce=False)
    setup.sharded.targets["w"].requires_grad_()
    setup.backward(0 * module["v"].sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["w"].unique().tolist() == [2.0]
    assert found["v"].unique().tolist() == [3.0]


def test_a_parameter_toggled_off_takes_no_gradient_and_keeps_its_earlier_one() -> None:
    run_ranks(_toggled, 2)
