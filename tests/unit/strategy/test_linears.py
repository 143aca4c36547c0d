"""Which linear layers are swapped for ones in eight bits, and which never."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_moe.config import (
    AttentionConfig,
    LatentMoEConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoETransformer
from lightning_moe.precision import LinearRecipe
from lightning_moe.strategy.linears import LinearSwap

# A dense layer, then one with latent experts and a shared expert; heads of 16 make keys and values 32 wide.
CONFIG = TransformerConfig(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    attention=AttentionConfig(num_heads=2),
    moe=MoEConfig(
        num_experts=4,
        hidden_size=32,
        router=RouterConfig(top_k=2),
        latent=LatentMoEConfig(latent_dim=16),
        shared=SharedExpertConfig(hidden_size=64),
    ),
    layer_overrides={0: LayerConfig(dense_hidden_size=96)},
)
CONVERTED = [
    "blocks.0.attention.q_proj",
    "blocks.0.attention.k_proj",
    "blocks.0.attention.v_proj",
    "blocks.0.attention.out_proj",
    "blocks.0.feed_forward.up_gate",
    "blocks.0.feed_forward.down",
    "blocks.1.attention.q_proj",
    "blocks.1.attention.k_proj",
    "blocks.1.attention.v_proj",
    "blocks.1.attention.out_proj",
    "blocks.1.feed_forward.shared.up_gate",
    "blocks.1.feed_forward.shared.down",
]
LEFT = ["blocks.1.feed_forward.latent.down", "blocks.1.feed_forward.latent.up", "head"]
EMULATED = LinearRecipe(name="mxfp8", emulate=True)


def _model(config: TransformerConfig = CONFIG) -> MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(config)


def _changed(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    """Names of modules that aren't those of before."""
    return [name for name, module in model.named_modules() if modules[name] is not module]


def test_attention_dense_layers_and_shared_experts_are_converted_and_nothing_else() -> None:
    model = _model()
    before, state = dict(model.named_modules()), model.state_dict()
    LinearSwap(EMULATED).swap(model)
    assert _changed(model, before) == CONVERTED
    linears = [name for name, part in before.items() if isinstance(part, nn.Linear)]
    assert sorted(linears) == sorted([*CONVERTED, *LEFT])
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(after[name].data_ptr() == state[name].data_ptr() for name in state)


def test_only_converted_layers_compute_otherwise() -> None:
    model = _model()
    LinearSwap(EMULATED).swap(model)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            x = torch.randn(3, part.in_features, generator=torch.Generator().manual_seed(1))
            exact = nn.functional.linear(x, part.weight, part.bias)
            assert torch.equal(part(x), exact) == (name in LEFT), name


def test_layers_come_back_with_what_happened_to_them_meanwhile() -> None:
    model = _model()
    before = dict(model.named_modules())
    swap = LinearSwap(EMULATED)
    swap.swap(model)
    model.to(torch.bfloat16).eval()
    swap.restore()
    assert _changed(model, before) == []
    assert not any(part.training for part in model.modules())
    assert model.blocks[0].attention.q_proj.weight.dtype == torch.bfloat16


def test_a_second_swap_starts_from_the_layers_of_before() -> None:
    model = _model()
    before = dict(model.named_modules())
    swap = LinearSwap(EMULATED)
    swap.swap(model)
    swap.swap(model)
    swap.restore()
    assert _changed(model, before) == []


def test_a_weight_that_another_module_holds_as_well_stays() -> None:
    model = _model(replace(CONFIG, vocab_size=192))
    dense = model.blocks[0].feed_forward
    # 192 rows, as the embedding has.
    dense.up_gate.weight = model.embedding.weight
    before = dict(model.named_modules())
    LinearSwap(EMULATED).swap(model)
    assert _changed(model, before) == [n for n in CONVERTED if n != "blocks.0.feed_forward.up_gate"]


def test_a_layer_that_computes_something_else_stays() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = _model()
    model.blocks[0].attention.q_proj = Scaled(32, 32)
    before = dict(model.named_modules())
    LinearSwap(EMULATED).swap(model)
    assert _changed(model, before) == CONVERTED[1:]


def test_widths_that_do_not_fit_are_refused_before_any_layer_is_changed() -> None:
    config = replace(CONFIG, attention=AttentionConfig(num_heads=2, num_kv_heads=1))
    model = _model(config)
    before = dict(model.named_modules())
    with pytest.raises(
        ValueError,
        match=r"^MoEPrecision linears=mxfp8 can't convert blocks\.0\.attention\.k_proj: it maps 32 to 16 features.*"
        r"model\.attention.*or leave linears out$",
    ):
        LinearSwap(EMULATED).swap(model)
    assert _changed(model, before) == []


def test_a_module_without_such_layers_is_refused() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Embedding(3, 32))
    with pytest.raises(ValueError, match=r"^MoEPrecision linears=mxfp8 has no effect: the module"):
        LinearSwap(EMULATED).swap(module)


def test_what_was_converted_is_told() -> None:
    swap = LinearSwap(EMULATED)
    swap.swap(_model())
    assert swap.settle() == (
        "linear layers: 12 of attention and dense feed-forward networks compute in mxfp8 (emulated by matmuls of the "
        "codes' values)"
    )


@pytest.mark.parametrize(
    ("recipe", "dtype", "reason"),
    [
        (LinearRecipe(name="fp8_rowwise"), torch.bfloat16, "the device is cpu"),
        (EMULATED, torch.float64, "not in float64"),
    ],
)
def test_what_cannot_run_is_refused(recipe: LinearRecipe, dtype: torch.dtype, reason: str) -> None:
    swap = LinearSwap(recipe)
    swap.swap(_model().to(dtype))
    with pytest.raises(
        ValueError, match=rf"^MoEPrecision linears={recipe.name} can't work here: .*{reason}"
    ):
        swap.settle()
