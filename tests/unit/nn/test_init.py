"""Initial weights: a function of seed, name and expert id, and of nothing else."""

import hashlib

import pytest
import torch
from torch import Tensor

from lightning_moe.config import (
    AttentionConfig,
    LatentMoEConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.nn import MLP, MoE, MoETransformer
from lightning_moe.nn.init import init_weights_


def _moe(num_experts: int = 4) -> MoEConfig:
    return MoEConfig(
        num_experts=num_experts,
        hidden_size=3,
        router=RouterConfig(top_k=2, bias=True, bias_gamma=1e-3),
        expert_bias=True,
        shared=SharedExpertConfig(hidden_size=5),
        latent=LatentMoEConfig(latent_dim=4, bias=True, norm="rms"),
    )


def _model(seed: int = 0, *, num_experts: int = 4, num_layers: int = 3) -> MoETransformer:
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=num_layers,
        attention=AttentionConfig(num_heads=2, qk_norm="head", bias=True),
        moe=_moe(num_experts),
        dense_hidden_size=6,
        num_dense_layers=1,
    )
    return MoETransformer(config)


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_same_seed_same_weights_other_seed_other_weights_exactly() -> None:
    first, again, other = (_model(seed).state_dict() for seed in (0, 0, 1))
    _assert_same(first, again)
    for name, value in first.items():
        drawn = value.dim() > 1 and not name.endswith(("b_up_gate", "b_down"))
        assert torch.equal(value, other[name]) is not drawn, name


def test_an_expert_does_not_depend_on_the_number_of_experts_exactly() -> None:
    few, many = (_model(num_experts=n).state_dict() for n in (4, 8))
    for name in ("w_up_gate", "w_down"):
        full = f"blocks.1.feed_forward.experts.{name}"
        assert torch.equal(few[full], many[full][:4])
        assert not torch.equal(many[full][:4], many[full][4:])
    dense = [name for name in few if ".router." not in name and ".experts." not in name]
    _assert_same({name: few[name] for name in dense}, {name: many[name] for name in dense})


def test_an_expert_of_a_lone_layer_does_not_depend_on_the_number_of_experts_exactly() -> None:
    layers = []
    for num_experts in (4, 8):
        torch.manual_seed(0)
        layers.append(MoE(8, _moe(num_experts)))
    assert torch.equal(layers[0].experts.w_down, layers[1].experts.w_down[:4])
    assert torch.equal(layers[0].shared.down.weight, layers[1].shared.down.weight)


def test_a_layer_does_not_depend_on_the_number_of_layers_exactly() -> None:
    short, long = (_model(num_layers=n).state_dict() for n in (2, 3))
    _assert_same(short, {name: long[name] for name in short})


def test_layers_and_experts_of_equal_shape_differ() -> None:
    model = _model()
    first, second = model.blocks[1], model.blocks[2]
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    for (name, ours), (_, theirs) in pairs:
        drawn = ours.dim() > 1 and ".b_" not in name
        assert torch.equal(ours, theirs) is not drawn, name
    experts = first.feed_forward.experts.w_down
    assert not torch.equal(experts[0], experts[1])


def test_weights_do_not_depend_on_the_type_they_are_kept_in() -> None:
    single = _model().state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        double = _model().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert double["embedding.weight"].dtype == torch.float64
    _assert_same(single, {name: value.float() for name, value in double.items()})


def test_biases_are_zero_norms_one_and_matrices_within_three_deviations() -> None:
    for name, value in _model().state_dict().items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        elif value.dim() == 1 or ".b_" in name:
            assert torch.equal(value, torch.zeros_like(value)), name
        else:
            assert 0 < value.abs().max() <= 0.06, name


def test_standard_deviation_is_that_of_a_cut_normal() -> None:
    layer = MLP(64, 100)
    init_weights_(layer, seed=5, std=0.1)
    for weight in layer.parameters():
        # A normal cut at three deviations has 0.9866 of its deviation.
        assert weight.std().item() == pytest.approx(0.09866, rel=0.03)
        assert weight.mean().abs() < 3e-3
        assert 0.25 < weight.abs().max() <= 0.3


def test_draw_follows_the_written_recipe_exactly() -> None:
    # Checkpoints of a seed stay reproducible only while this recipe does.
    layer = MLP(3, 2)
    init_weights_(layer, seed=5, std=0.1)
    digest = hashlib.sha256(b"5/down.weight").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    expected = torch.empty(3, 2)
    torch.nn.init.trunc_normal_(expected, std=0.1, a=-0.3, b=0.3, generator=generator)
    assert torch.equal(layer.down.weight, expected)


def test_model_from_the_meta_device_equals_a_normal_one_exactly() -> None:
    normal = _model()
    with torch.device("meta"):
        model = _model()
    assert all(value.is_meta for value in model.state_dict().values())
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(torch.nan)
    model.reset_parameters()
    _assert_same(model.state_dict(), normal.state_dict())


def test_reset_takes_a_seed_and_leaves_the_global_generator_alone() -> None:
    first, second = _model(0), _model(1)
    torch.manual_seed(3)
    first.reset_parameters(seed=7)
    drawn = torch.rand(1)
    second.reset_parameters(seed=7)
    _assert_same(first.state_dict(), second.state_dict())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)


def test_reset_clears_the_selection_bias() -> None:
    model = _model()
    bias = model.blocks[1].feed_forward.router.score_bias
    bias.fill_(0.5)
    model.reset_parameters()
    assert bias.tolist() == [0.0] * 4


def test_lone_layer_from_the_meta_device_equals_a_normal_one_exactly() -> None:
    torch.manual_seed(0)
    normal = MoE(8, _moe())
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = MoE(8, _moe())
    layer.to_empty(device="cpu").reset_parameters()
    _assert_same(layer.state_dict(), normal.state_dict())


def test_new_model_takes_one_number_from_the_global_generator() -> None:
    torch.manual_seed(0)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    _model(seed=0)
    assert torch.equal(torch.rand(1), expected)
