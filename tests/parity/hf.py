"""Mixture-of-experts blocks of Hugging Face transformers that hold the same weights as ours.

Imported by the tests of the parity tier when they run, not when they are collected: without the `peers` extra the
rest of the suite works, and selecting this tier is an error rather than a silent skip.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_moe.config import AttentionConfig, MoEConfig, RouterConfig, TransformerConfig
from lightning_moe.nn import MoE, MoETransformer

Family = Literal["olmoe", "qwen3_moe"]

# Qwen3-MoE divides the weights of a token's experts by their sum; OLMoE takes the softmax as it is.
ROUTERS: Final[dict[Family, RouterConfig]] = {
    "olmoe": RouterConfig(),
    "qwen3_moe": RouterConfig(normalize_expert_weights=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of one layer."""

    d_model: int
    hidden_size: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Weights of one layer, or their gradients, in a layout of neither side.

    Attributes:
        router: (E, D).
        gate, up: (E, F, D).
        down: (E, D, F).
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def random_weights(sizes: Sizes, generator: torch.Generator) -> LayerTensors:
    """Normal, scaled so that activations keep the size of the input."""
    width, hidden, experts = sizes.d_model, sizes.hidden_size, sizes.num_experts

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return LayerTensors(
        router=draw(experts, width),
        gate=draw(experts, hidden, width),
        up=draw(experts, hidden, width),
        down=draw(experts, width, hidden),
    )


def our_layer(family: Family, sizes: Sizes, weights: LayerTensors) -> MoE:
    """Our layer with these weights."""
    router = RouterConfig(
        top_k=sizes.top_k, normalize_expert_weights=ROUTERS[family].normalize_expert_weights
    )
    config = MoEConfig(num_experts=sizes.num_experts, hidden_size=sizes.hidden_size, router=router)
    layer = MoE(sizes.d_model, config)
    with torch.no_grad():
        layer.router.weight.copy_(weights.router)
        layer.experts.w_up_gate.copy_(torch.cat((weights.up, weights.gate), dim=1))
        layer.experts.w_down.copy_(weights.down.transpose(1, 2))
    return layer


def their_layer(
    family: Family, sizes: Sizes, weights: LayerTensors, *, implementation: str
) -> nn.Module:
    """The block of transformers with these weights; `implementation` is one of its experts interface."""
    shared = {
        "hidden_size": sizes.d_model,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "experts_implementation": implementation,
    }
    if family == "olmoe":
        block = OlmoeSparseMoeBlock(OlmoeConfig(intermediate_size=sizes.hidden_size, **shared))
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(moe_intermediate_size=sizes.hidden_size, norm_topk_prob=True, **shared)
        )
    assert block.experts.config._experts_implementation == implementation
    with torch.no_grad():
        block.gate.weight.copy_(weights.router)
        block.experts.gate_up_proj.copy_(torch.cat((weights.gate, weights.up), dim=1))
        block.experts.down_proj.copy_(weights.down)
    return block


def our_tensors(layer: MoE, *, grad: bool = False) -> LayerTensors:
    """What our layer holds now: its weights, or with `grad` their gradients."""
    up, gate = _read(layer.experts.w_up_gate, grad).chunk(2, dim=1)
    return LayerTensors(
        router=_read(layer.router.weight, grad),
        gate=gate,
        up=up,
        down=_read(layer.experts.w_down, grad).transpose(1, 2),
    )


def their_tensors(block: nn.Module, *, grad: bool = False) -> LayerTensors:
    """What the block of transformers holds now: its weights, or with `grad` their gradients."""
    gate, up = _read(block.experts.gate_up_proj, grad).chunk(2, dim=1)
    return LayerTensors(
        router=_read(block.gate.weight, grad),
        gate=gate,
        up=up,
        down=_read(block.experts.down_proj, grad),
    )


def _read(parameter: Tensor, grad: bool) -> Tensor:
    chosen = parameter.grad if grad else parameter.detach()
    assert chosen is not None
    return chosen


def tiny_olmoe(generator: torch.Generator) -> tuple[OlmoeForCausalLM, MoETransformer]:
    """A whole OLMoE model of two layers with random weights, norms included, and ours with the same."""
    theirs = OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=53,
            hidden_size=24,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=6,
            num_experts_per_tok=3,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
            pad_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise
            )
    ours = MoETransformer(
        TransformerConfig(
            vocab_size=53,
            d_model=24,
            num_layers=2,
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, qk_norm="full", rope_theta=10_000.0
            ),
            moe=MoEConfig(num_experts=6, hidden_size=12, router=RouterConfig(top_k=3)),
            norm_eps=1e-5,
        )
    )
    ours.load_state_dict(our_state(dict(theirs.named_parameters())))
    return theirs, ours


def our_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights (or gradients) of an OLMoE model by our names and layouts."""
    return {_our_name(name): _our_layout(name, tensor) for name, tensor in tensors.items()}


_NAMES: Final = {
    "embed_tokens.weight": "embedding.weight",
    "norm.weight": "final_norm.weight",
    "input_layernorm.weight": "attention_in_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_in_norm.weight",
    "self_attn.q_proj.weight": "attention.q_proj.weight",
    "self_attn.k_proj.weight": "attention.k_proj.weight",
    "self_attn.v_proj.weight": "attention.v_proj.weight",
    "self_attn.o_proj.weight": "attention.out_proj.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "mlp.gate.weight": "feed_forward.router.weight",
    "mlp.experts.gate_up_proj": "feed_forward.experts.w_up_gate",
    "mlp.experts.down_proj": "feed_forward.experts.w_down",
}


def _our_name(name: str) -> str:
    if name == "lm_head.weight":
        return "head.weight"
    rest = name.removeprefix("model.")
    if not rest.startswith("layers."):
        return _NAMES[rest]
    _, layer, rest = rest.split(".", maxsplit=2)
    return f"blocks.{layer}.{_NAMES[rest]}"


def _our_layout(name: str, tensor: Tensor) -> Tensor:
    if name.endswith("gate_up_proj"):
        gate, up = tensor.detach().chunk(2, dim=1)
        return torch.cat((up, gate), dim=1)
    return tensor.detach().transpose(1, 2) if name.endswith("down_proj") else tensor.detach()
