"""Recomputed activations: the same routing, the same loss, the same gradients, counted once."""

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.config import (
    AttentionConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoE, MoETransformer, Routing, balance_loss, z_loss
from lightning_moe.nn.offload import HostCopy
from lightning_moe.nn.recompute import recomputed
from tests.kit.memory import kept_bytes
from tests.kit.operators import Calls
from tests.kit.randomized import randomized

ROUTERS = {
    "plain": RouterConfig(top_k=2, z_loss_weight=0.1),
    "jitter": RouterConfig(top_k=2, z_loss_weight=0.1, jitter_eps=0.3),
    "random": RouterConfig(top_k=2, z_loss_weight=0.1, random_expert_assignment=True),
    "groups": RouterConfig(top_k=2, z_loss_weight=0.1, n_group=2, topk_group=1),
}
# What each way of keeping activations does: routers and attentions that run once more in backward, of two layers.
WAYS: dict[str, dict[str, Any]] = {
    "block": {"recompute": "block"},
    "moe": {"recompute": "moe"},
    "attention": {"recompute": "attention"},
    "first layer only": {"layer_overrides": {0: LayerConfig(recompute="block")}},
    "all but the first layer's": {
        "recompute": "attention",
        "layer_overrides": {0: LayerConfig(recompute="none")},
    },
    "offloaded": {"offload_activations": True},
    "block, offloaded": {"recompute": "block", "offload_activations": True},
}
RUN_AGAIN = {
    "block": (2, 2),
    "moe": (2, 0),
    "attention": (0, 2),
    "first layer only": (1, 1),
    "all but the first layer's": (0, 1),
    "offloaded": (0, 0),
    "block, offloaded": (2, 2),
}


def _model(
    router: RouterConfig,
    recompute: str = "none",
    *,
    zero_router: bool = False,
    **options: Any,
) -> MoETransformer:
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=2,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=6, hidden_size=5, router=router),
        recompute=recompute,
        **options,
    )
    model = randomized(MoETransformer(config), torch.Generator().manual_seed(1)).double()
    if zero_router:
        for block in model.blocks:
            nn.init.zeros_(block.feed_forward.router.weight)
    return model


def _run(model: MoETransformer, ids: Tensor) -> tuple[Tensor, list[Routing], list[Tensor]]:
    """Loss, records and all gradients."""
    torch.manual_seed(3)
    logits, records = model(ids)
    loss = logits.logsumexp(dim=-1).sum() + balance_loss(records) + z_loss(records)
    loss.backward()
    return loss.detach(), records, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("zero_router", [False, True], ids=["learned", "all tied"])
def test_recomputation_changes_nothing_exactly(
    router: str, zero_router: bool, generator: torch.Generator
) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    _assert_equal(
        *(
            _run(_model(ROUTERS[router], recompute, zero_router=zero_router), ids)
            for recompute in ("none", "block")
        )
    )


@pytest.mark.parametrize("way", WAYS)
def test_any_way_of_keeping_activations_changes_nothing_exactly(
    way: str, generator: torch.Generator
) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    models = (_model(ROUTERS["jitter"]), _model(ROUTERS["jitter"], **WAYS[way]))
    _assert_equal(*(_run(model, ids) for model in models))


def _assert_equal(
    plain: tuple[Tensor, list[Routing], list[Tensor]],
    again: tuple[Tensor, list[Routing], list[Tensor]],
) -> None:
    assert all(record.requested_E.sum() == 2 * 5 * 2 for record in again[1])
    assert torch.equal(plain[0], again[0])
    for ours, theirs in zip(plain[1], again[1], strict=True):
        for field in fields(Routing):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            assert left is right is None or torch.equal(left, right), field.name
    for ours, theirs in zip(plain[2], again[2], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_asked_for_runs_twice_and_experts_are_chosen_once(
    way: str, generator: torch.Generator
) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    routers, attentions = RUN_AGAIN[way]
    with (
        Calls("aten._softmax.default") as softmax,
        Calls("aten._scaled_dot_product_flash_attention_for_cpu.default") as attention,
        Calls("lightning_moe.top_experts") as choice,
    ):
        _run(_model(ROUTERS["plain"], **WAYS[way]), ids)
    assert (softmax.count, attention.count, choice.count) == (2 + routers, 2 + attentions, 2)


def test_the_more_is_recomputed_the_less_is_kept(generator: torch.Generator) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    kept = {}
    for way in ("none", "block", "moe", "attention"):
        model = _model(ROUTERS["plain"], way)
        kept[way] = kept_bytes(lambda model=model: model(ids), without=model.parameters())
    assert kept["block"] < kept["moe"] < kept["attention"] < kept["none"]
    # The parts of a layer are kept, or not, independently of each other.
    saved = {way: kept["none"] - kept[way] for way in kept}
    assert saved["moe"] + saved["attention"] <= saved["block"]


def test_a_host_copy_gives_back_values_type_and_layout_exactly(generator: torch.Generator) -> None:
    original = torch.randn(7, 5, generator=generator).bfloat16().t()
    copy = HostCopy.of(original)
    expected = original.clone()
    original.zero_()
    restored = copy.restored()
    assert torch.equal(restored, expected)
    assert (restored.dtype, restored.stride()) == (torch.bfloat16, original.stride())


def test_offloading_on_a_cpu_copies_nothing(generator: torch.Generator) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    copies = {}
    for offload in (False, True):
        model = _model(ROUTERS["plain"], offload_activations=offload)
        with Calls("aten.copy_") as copy:
            _run(model, ids)
        copies[offload] = copy.count
    assert copies[True] == copies[False]


@pytest.mark.parametrize("training", [True, False])
def test_only_training_with_gradients_recomputes(
    training: bool, generator: torch.Generator
) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    counts = {}
    for recompute in ("none", "block"):
        model = _model(ROUTERS["plain"], recompute).train(training)
        with Calls("aten._softmax.default") as softmax:
            _run(model, ids)
            with torch.no_grad():
                model(ids)
        counts[recompute] = softmax.count
    # One softmax per router: two layers, with and without gradients, and two more where it recomputes.
    assert counts["block"] - counts["none"] == (2 if training else 0)
    assert counts["none"] == _softmaxes_of_two_forwards(ids)


def _softmaxes_of_two_forwards(ids: Tensor) -> int:
    model = _model(ROUTERS["plain"], "none")
    with torch.no_grad(), Calls("aten._softmax.default") as softmax:
        model(ids)
        model(ids)
    return softmax.count


class _Drifting(nn.Module):
    """A layer whose input differs each time it is computed, as rounding might make it, only more."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer, self.noise = layer, torch.zeros(())
        self.ids: list[Tensor] = []
        layer.router.register_forward_hook(lambda _module, _args, out: self.ids.append(out[1]))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x plus the noise of the moment."""
        y, _ = self.layer(x + self.noise * torch.linspace(-1, 1, x.numel()).view_as(x))
        return y


def _drifting(generator: torch.Generator) -> tuple[_Drifting, Tensor]:
    router = RouterConfig(top_k=2)
    layer = randomized(MoE(8, MoEConfig(num_experts=6, hidden_size=5, router=router)), generator)
    return _Drifting(layer.double()), torch.randn(7, 8, generator=generator, dtype=torch.float64)


def test_a_perturbed_recomputation_keeps_the_first_choice_exactly(
    generator: torch.Generator,
) -> None:
    module, x = _drifting(generator)
    x.requires_grad_()
    y = recomputed(module, x)
    module.noise = torch.tensor(2.0)
    y.square().sum().backward()
    first, second = module.ids
    assert torch.equal(first, second)
    # The perturbation is large enough to change the choice where it is not pinned.
    assert not torch.equal(
        module.layer.router(x + 2 * torch.linspace(-1, 1, 56).view(7, 8))[1], first
    )


def test_two_calls_in_flight_replay_their_own_choices_exactly(generator: torch.Generator) -> None:
    module, x = _drifting(generator)
    inputs = [x.clone().requires_grad_(), x.flip(0).neg().requires_grad_()]
    outputs = [recomputed(module, tokens) for tokens in inputs]
    module.noise = torch.tensor(2.0)
    for output in reversed(outputs):
        output.square().sum().backward()
    assert torch.equal(module.ids[2], module.ids[1])
    assert torch.equal(module.ids[3], module.ids[0])
    assert not torch.equal(module.ids[0], module.ids[1])


def test_small_perturbation_moves_gradients_by_its_own_size_only(
    generator: torch.Generator,
) -> None:
    module, x = _drifting(generator)
    gradients = []
    for noise in (0.0, 1e-9):
        twin = copy.deepcopy(module)
        twin.noise = torch.zeros(())
        y = recomputed(twin, x.requires_grad_())
        twin.noise = torch.tensor(noise, dtype=torch.float64)
        gradients += torch.autograd.grad(y.square().sum(), twin.layer.experts.w_down)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_a_record_from_a_reentrant_checkpoint_is_refused(generator: torch.Generator) -> None:
    layer = MoE(8, MoEConfig(num_experts=3, hidden_size=4))
    x = torch.randn(5, 8, generator=generator, requires_grad=True)
    _, record = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"reentrant checkpoint"):
        balance_loss([record])


def test_recomputation_works_under_autocast(generator: torch.Generator) -> None:
    ids = torch.randint(11, (2, 5), generator=generator)
    results = []
    for recompute in ("none", "block"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model = _model(ROUTERS["plain"], recompute).float()
            logits, records = model(ids)
            loss = logits.float().logsumexp(dim=-1).sum() + balance_loss(records)
        loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
