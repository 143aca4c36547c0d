"""The balance loss over the tokens of all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe import StepWindow
from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from lightning_moe.nn.router_losses import router_losses
from lightning_moe.step.balance_counts import balance_counts
from tests.kit.randomized import randomized
from tests.kit.ranks import run_ranks

NUM_LAYERS = 3


def _layers(scope: str) -> list[MoE]:
    router = RouterConfig(top_k=2, lb_loss_weight=0.3, lb_loss_scope=scope, z_loss_weight=0.1)
    # Layers may differ in their number of experts.
    configs = [
        MoEConfig(num_experts=4 + i, hidden_size=3, router=router) for i in range(NUM_LAYERS)
    ]
    generator = torch.Generator().manual_seed(0)
    return [randomized(MoE(6, config), generator).double() for config in configs]


def _tokens(rank: int) -> tuple[Tensor, Tensor]:
    """Tokens, and which are valid: more of them on later ranks."""
    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    return x, torch.arange(7) < 3 + rank


def _loss(layers: list[MoE], x: Tensor, valid: Tensor, reduce: Any = None) -> Tensor:
    records = [layer(x, valid)[1] for layer in layers]
    if reduce is None:
        return router_losses(layers, records).total
    counts = balance_counts(layers, records, StepWindow(), all_reduce_sum=reduce, counts_ahead=list)
    return router_losses(layers, records, counts).total


class Reduction:
    """An all-reduce that counts its calls and elements."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.sizes.append(tensor.numel())
        dist.all_reduce(tensor)
        return tensor


def _global_scope(rank: int, world: int) -> list[int]:
    layers, whole, reduce = _layers("global_micro_batch"), _layers("micro_batch"), Reduction()
    loss = _loss(layers, *_tokens(rank), reduce)
    loss.backward()
    tokens = [_tokens(r) for r in range(world)]
    expected = _loss(whole, torch.cat([x for x, _ in tokens]), torch.cat([v for _, v in tokens]))
    expected.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    for layer, reference in zip(layers, whole, strict=True):
        gradient = layer.router.weight.grad
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, reference.router.weight.grad, rtol=1e-12, atol=1e-12)
    return reduce.sizes


@pytest.mark.parametrize("world", [2, 4])
def test_over_ranks_it_is_the_loss_of_one_process_with_all_tokens(world: int) -> None:
    for sizes in run_ranks(_global_scope, world, timeout_s=120):
        assert sizes == [4 + 5 + 6]  # one message for all layers


def _equal_data(rank: int, world: int) -> None:
    gradients = []
    for scope in ("global_micro_batch", "micro_batch"):
        layers = _layers(scope)
        _loss(layers, *_tokens(0), Reduction()).backward()
        gradients.append([layer.router.weight.grad for layer in layers])
    for over_ranks, local in zip(*gradients, strict=True):
        torch.testing.assert_close(over_ranks, local, rtol=1e-12, atol=1e-14)


def test_equal_data_on_all_ranks_give_the_gradient_of_the_local_scope() -> None:
    run_ranks(_equal_data, 2)


def _local_scopes(rank: int, world: int, scope: str) -> list[int]:
    reduce = Reduction()
    layers = _layers(scope)
    x, valid = _tokens(rank)
    _loss(layers, x[None], valid[None], reduce)
    return reduce.sizes


@pytest.mark.parametrize("scope", ["micro_batch", "sequence"])
def test_local_scopes_send_nothing(scope: str) -> None:
    assert run_ranks(_local_scopes, 2, scope) == [[], []]
