"""Spreading experts changes which weights a layer holds, and nothing else."""

import pytest
import torch
from torch import nn

from lightning_moe.config import LatentMoEConfig, MoEConfig, RouterConfig, SharedExpertConfig
from lightning_moe.nn import LocalDispatcher, MoE
from lightning_moe.parallel import MeshShape, apply_expert_parallel


def _layer(num_experts: int = 6) -> MoE:
    torch.manual_seed(0)
    return MoE(
        7,
        MoEConfig(
            num_experts=num_experts,
            hidden_size=3,
            router=RouterConfig(top_k=2, bias=True),
            latent=LatentMoEConfig(latent_dim=5),
            shared=SharedExpertConfig(hidden_size=4),
            expert_bias=True,
        ),
    )


def _spread(module: nn.Module, *, world: int, ep: int, rank: int) -> None:
    apply_expert_parallel(
        module, MeshShape(world=world, ep=ep), rank, lambda layer: LocalDispatcher()
    )


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_each_rank_keeps_exactly_its_experts_and_all_of_the_rest(ep: int) -> None:
    whole = dict(_layer().named_parameters())
    for rank in range(6):
        layer = _layer()
        _spread(layer, world=6, ep=ep, rank=rank)
        first, per_rank = rank % ep * (6 // ep), 6 // ep
        for name, parameter in layer.named_parameters():
            expected = whole[name]
            if name.startswith("experts."):
                expected = expected[first : first + per_rank]
            assert torch.equal(parameter, expected), name
            assert parameter.is_leaf
            assert parameter.requires_grad


def test_kept_experts_do_not_hold_the_memory_of_the_others() -> None:
    layer = _layer()
    _spread(layer, world=2, ep=2, rank=1)
    for parameter in layer.experts.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


def test_spreading_again_changes_nothing() -> None:
    layer = _layer()
    _spread(layer, world=2, ep=2, rank=1)
    before = list(layer.parameters())
    _spread(layer, world=2, ep=2, rank=1)
    assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))


def test_a_module_with_one_layer_that_does_not_fit_is_left_as_it_was() -> None:
    module = nn.ModuleList([_layer(6), _layer(5)])
    before = list(module.parameters())
    with pytest.raises(ValueError, match="num_experts=5 is not a multiple"):
        _spread(module, world=2, ep=2, rank=0)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_experts_on_the_meta_device_are_spread_as_well() -> None:
    with torch.device("meta"):
        layer = _layer()
    _spread(layer, world=3, ep=3, rank=2)
    assert layer.experts.w_down.is_meta
    assert layer.experts.w_down.shape[0] == 2
    assert layer.experts.expert_ids == range(4, 6)


def test_frozen_experts_stay_frozen() -> None:
    layer = _layer()
    layer.experts.requires_grad_(False)
    _spread(layer, world=2, ep=2, rank=1)
    assert not any(parameter.requires_grad for parameter in layer.experts.parameters())


def test_a_module_without_moe_layers_is_left_alone() -> None:
    module = nn.Linear(3, 2)
    _spread(module, world=2, ep=1, rank=1)
    assert module.weight.shape == (2, 3)


def test_experts_that_left_can_not_come_back() -> None:
    layer = _layer()
    _spread(layer, world=2, ep=2, rank=1)
    with pytest.raises(ValueError, match="not among"):
        _spread(layer, world=2, ep=2, rank=0)
