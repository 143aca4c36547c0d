"""Every trainable parameter is in exactly one group, the one of its role."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_moe import (
    AttentionConfig,
    LatentMoEConfig,
    MoEConfig,
    MoEModule,
    OptimConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoETransformer
from lightning_moe.optim import build_optimizer, parameter_groups
from tests.kit.runs import make_batches, make_module, run, tiny_config

pytestmark = pytest.mark.usefixtures("shape_checker_off_in_module")

OPTIM = OptimConfig(lr=0.1, weight_decay=0.3, router_lr_scale=0.5, expert_lr_scale=2.0)


def _names(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}


@st.composite
def _configs(draw: st.DrawFn) -> TransformerConfig:
    flag = st.booleans()
    moe = MoEConfig(
        num_experts=4,
        hidden_size=3,
        router=RouterConfig(
            top_k=2, bias=draw(flag), bias_gamma=draw(st.sampled_from([None, 0.1]))
        ),
        expert_bias=draw(flag),
        latent=LatentMoEConfig(
            latent_dim=4, bias=draw(flag), norm=draw(st.sampled_from([None, "rms", "layer"]))
        )
        if draw(flag)
        else None,
        shared=SharedExpertConfig(hidden_size=5) if draw(flag) else None,
    )
    return TransformerConfig(
        vocab_size=7,
        d_model=8,
        num_layers=2,
        attention=AttentionConfig(
            num_heads=2, bias=draw(flag), qk_norm=draw(st.sampled_from([None, "head", "full"]))
        ),
        moe=draw(st.sampled_from([None, moe])),
        dense_hidden_size=6,
        num_dense_layers=draw(st.integers(0, 2)),
        norm_placement=draw(st.sampled_from(["pre", "post", "peri"])),
        norm_embedding=draw(flag),
        tie_embeddings=draw(flag),
    )


@settings(max_examples=40, deadline=None)
@given(_configs())
def test_every_trainable_parameter_is_in_exactly_one_group(config: TransformerConfig) -> None:
    model = MoETransformer(config)
    groups = parameter_groups(model, OPTIM)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters())
    assert all(group["params"] for group in groups)


@settings(max_examples=40, deadline=None)
@given(_configs())
def test_vectors_and_embeddings_never_decay_and_matrices_always_do(
    config: TransformerConfig,
) -> None:
    model = MoETransformer(config)
    decays = {
        id(parameter): group["weight_decay"] > 0
        for group in parameter_groups(model, OPTIM)
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        is_bias = name.rsplit(".", 1)[-1].startswith(("bias", "b_"))
        expected = parameter.ndim > 1 and not is_bias and not name.startswith("embedding")
        assert decays[id(parameter)] == expected, name


def test_groups_hold_the_parameters_of_their_role() -> None:
    model = MoETransformer(tiny_config(bias=True))
    names = _names(model, parameter_groups(model, OPTIM))
    layers = [f"blocks.{layer}" for layer in range(2)]
    assert names["router"] == {f"{layer}.feed_forward.router.weight" for layer in layers}
    experts = {
        f"{layer}.feed_forward.experts.w_{side}" for layer in layers for side in ("up_gate", "down")
    }
    assert names["experts"] == experts
    assert {f"{layer}.feed_forward.router.bias" for layer in layers} < names["no_decay"]
    assert {"embedding.weight", "final_norm.weight"} < names["no_decay"]
    assert {"head.weight", "blocks.0.attention.q_proj.weight"} < names["decay"]


def test_learning_rates_are_scaled_by_role() -> None:
    groups = {
        group["name"]: group for group in parameter_groups(MoETransformer(tiny_config()), OPTIM)
    }
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates == pytest.approx({"decay": 0.1, "no_decay": 0.1, "router": 0.05, "experts": 0.2})
    decays = {name: group["weight_decay"] for name, group in groups.items()}
    assert decays == {"decay": 0.3, "no_decay": 0.0, "router": 0.3, "experts": 0.3}


def test_tied_embeddings_are_one_parameter_without_decay() -> None:
    model = MoETransformer(tiny_config(tie_embeddings=True))
    names = _names(model, parameter_groups(model, OPTIM))
    assert "embedding.weight" in names["no_decay"]
    assert not any("head.weight" in members for members in names.values())


def test_a_parameter_with_two_owners_is_grouped_once() -> None:
    first, second = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    second.weight = first.weight
    groups = parameter_groups(nn.ModuleList([first, second]), OPTIM)
    assert [len(group["params"]) for group in groups] == [1]


def test_frozen_parameters_are_left_out() -> None:
    model = MoETransformer(tiny_config())
    for block in model.blocks:
        block.feed_forward.router.requires_grad_(False)
    names = _names(model, parameter_groups(model, OPTIM))
    assert "router" not in names
    assert not any("router" in name for members in names.values() for name in members)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the module requires a gradient"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OPTIM)


class _WithExtra(MoEModule):
    """A subclass with a parameter outside of the transformer."""

    def __init__(self, config: TransformerConfig, optim: OptimConfig) -> None:
        super().__init__(config, optim)
        self.extra = nn.Parameter(torch.ones(2))


def test_parameters_that_a_subclass_adds_are_optimized(tmp_path: Path) -> None:
    module = make_module(tiny_config(), _WithExtra, OPTIM)
    run(tmp_path, module, make_batches([(8, 8)]))
    groups = module.optimizers().param_groups
    assert any(module.extra is parameter for group in groups for parameter in group["params"])


def test_frozen_routers_train_the_rest_and_stay(tmp_path: Path) -> None:
    config = tiny_config(lb_loss_weight=1.0, z_loss_weight=1.0)
    module = make_module(config, MoEModule, OPTIM)
    for layer in module.moe_layers:
        layer.router.requires_grad_(False)
    before = {name: value.double() for name, value in module.model.state_dict().items()}
    after = run(tmp_path, module, make_batches([(8, 8)])).weights
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "head.weight" in changed
    assert not any("router" in name for name in changed)


def test_fused_adamw_clips_gradients_in_bf16_mixed(tmp_path: Path) -> None:
    module = make_module(tiny_config(), MoEModule, OPTIM)
    got = run(
        tmp_path, module, make_batches([(8, 8)] * 2), precision="bf16-mixed", gradient_clip_val=0.1
    )
    assert module.optimizers().param_groups[0]["fused"]
    assert got.num_steps == 2
    assert all(weight.dtype == torch.float32 for weight in got.weights.values())
