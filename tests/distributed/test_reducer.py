"""Gradients over ranks are those of the mean loss of everybody's tokens, in float32 where weights are narrower."""

import pytest
import torch
from torch import nn

from tests.kit.ranks import run_ranks
from tests.kit.reducer_runs import (
    CLOSE,
    Net,
    Setup,
    assert_gradients,
    make_tokens,
    mean_square,
)


def _one_step(rank: int, world: int, ep: int, split: bool) -> None:
    setup = Setup(Net(), world, ep, split=split)
    setup.backward(mean_square(setup.module, make_tokens(rank)))
    whole = Net()
    mean_square(whole, torch.cat([make_tokens(r) for r in range(world)])).backward()
    assert_gradients(setup, whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_expert_and_dense_gradients_are_exactly_those_of_the_global_mean(
    world: int, ep: int, split: bool
) -> None:
    run_ranks(_one_step, world, ep, split, timeout_s=120)


def _uneven(rank: int, world: int) -> None:
    """6 and 2 tokens, a mean over each rank's own: every parameter sees (g0 / 6 + g1 / 2) / 2."""
    sizes = (6, 2)
    tokens = [torch.cat([make_tokens(r), make_tokens(r, 1)])[: sizes[r]] for r in range(world)]
    setup = Setup(Net(), world, world)
    setup.backward(mean_square(setup.module, tokens[rank]))
    whole = Net()
    ((mean_square(whole, tokens[0]) + mean_square(whole, tokens[1])) / 2).backward()
    assert_gradients(setup, whole)


def test_experts_and_dense_parameters_weight_uneven_ranks_alike() -> None:
    run_ranks(_uneven, 2)


def _several_backwards(rank: int, world: int, ep: int, split: bool) -> None:
    """Manual optimisation: every backward of a step reduces."""
    setup = Setup(Net(), world, ep, split=split)
    for micro in range(3):
        setup.backward(mean_square(setup.module, make_tokens(rank, micro)))
    whole = Net()
    for micro in range(3):
        mean_square(whole, torch.cat([make_tokens(r, micro) for r in range(world)])).backward()
    assert_gradients(setup, whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_several_backwards_in_a_step_add_up(world: int, ep: int, split: bool) -> None:
    run_ranks(_several_backwards, world, ep, split, timeout_s=120)


def _low_precision_sums(rank: int, world: int, numel: int, split: bool) -> None:
    """1 + 64 * 2^-9 = 1.125; in bfloat16 every small term would be rounded away."""
    module = nn.ParameterDict({"w": torch.zeros(numel, dtype=torch.bfloat16)})
    setup = Setup(module, world, 1, split=split)
    for micro in range(65):
        scale = 1.0 if micro == 0 else 2.0**-9
        setup.backward(scale * module["w"].sum(), reduce=micro == 64)
    ((_, gradient, _),) = setup.gradients()
    assert gradient.unique().tolist() == [1.125]
    assert gradient.dtype == (torch.float32 if split else torch.bfloat16)


@pytest.mark.parametrize(("numel", "split"), [(3, False), (3, True), (4096, False), (4096, True)])
def test_low_precision_gradients_add_up_in_float32(numel: int, split: bool) -> None:
    run_ranks(_low_precision_sums, 2, numel, split)


def _means_in_float32(rank: int, world: int) -> None:
    """Rank 0 gives 1, the three others 2^-8: the mean of their float32 sum, rounded once."""
    module = nn.ParameterDict({"w": torch.zeros(4096, dtype=torch.bfloat16)})
    setup = Setup(module, world, 1, split=True)
    setup.backward((1.0 if rank == 0 else 2.0**-8) * module["w"].sum())
    ((_, gradient, _),) = setup.gradients()
    assert gradient.unique().tolist() == [(1 + 3 * 2.0**-8) / 4]


def test_ranks_add_up_in_float32() -> None:
    run_ranks(_means_in_float32, 4, timeout_s=120)


def _frozen(rank: int, world: int, trainable: str) -> None:
    nets = [Net(), Net()]
    for net in nets:
        for name, parameter in net.named_parameters():
            experts = ".experts." in name
            parameter.requires_grad_(experts == (trainable == "experts"))
    setup = Setup(nets[0], world, world)
    setup.backward(mean_square(setup.module, make_tokens(rank)))
    mean_square(nets[1], torch.cat([make_tokens(r) for r in range(world)])).backward()
    assert_gradients(setup, nets[1])


@pytest.mark.parametrize("trainable", ["experts", "dense"])
def test_models_with_frozen_parts_reduce_the_rest(trainable: str) -> None:
    run_ranks(_frozen, 2, trainable)


def _without_moe(rank: int, world: int) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(6, 3).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    setup = Setup(nets[0], world, 1)
    setup.backward(mean_square(nets[0], make_tokens(rank)))
    mean_square(nets[1], torch.cat([make_tokens(r) for r in range(world)])).backward()
    assert_gradients(setup, nets[1])


def test_a_model_without_moe_layers_is_plain_data_parallel() -> None:
    run_ranks(_without_moe, 2)


def _weight_penalty(_rank: int, world: int, ep: int) -> None:
    """A loss of the weights alone, as every rank has it; 0 for the experts it doesn't hold."""
    setup = Setup(Net(), world, ep)
    experts = dict(setup.module.named_parameters())["moe.experts.w_down"]
    setup.backward(experts.square().sum() / 2)
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    torch.testing.assert_close(found["moe.experts.w_down"], experts.detach(), **CLOSE)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_loss_of_an_experts_weights_alone_counts_once(ep: int) -> None:
    run_ranks(_weight_penalty, 2, ep)
