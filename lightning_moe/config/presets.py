"""Named models: a tiny one for a CPU, OLMoE, and the Olmo-core 3 reference models."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from lightning_moe.config.layers import AttentionConfig
from lightning_moe.config.moe import MoEConfig, SharedExpertConfig
from lightning_moe.config.router import RouterConfig

Options = dict[str, object]


def _tiny() -> Options:
    """A byte-level model (256 bytes and 8 special tokens) that learns on a CPU in minutes."""
    router = RouterConfig(
        top_k=2,
        normalize_expert_weights=1.0,
        restore_weight_scale=True,
        lb_loss_weight=0.01,
        z_loss_weight=1e-3,
        bias_gamma=1e-3,
    )
    return {
        "vocab_size": 264,
        "d_model": 128,
        "num_layers": 4,
        "num_dense_layers": 1,
        "dense_hidden_size": 384,
        "attention": AttentionConfig(num_heads=4, num_kv_heads=2, qk_norm="head"),
        "moe": MoEConfig(
            num_experts=8,
            hidden_size=128,
            router=router,
            shared=SharedExpertConfig(hidden_size=128),
        ),
    }


def _olmoe_1b_7b() -> Options:
    """OLMoE: 6.9B parameters, 1.3B active.

    Source: OLMoE, arXiv:2409.02060.
    """
    return {
        "vocab_size": 50_304,
        "d_model": 2048,
        "num_layers": 16,
        "attention": AttentionConfig(num_heads=16, qk_norm="full", rope_theta=10_000.0),
        "moe": MoEConfig(
            num_experts=64,
            hidden_size=1024,
            router=RouterConfig(top_k=8, lb_loss_weight=0.01, z_loss_weight=0.001),
        ),
        "norm_eps": 1e-5,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What differs between the Olmo-core 3 models of one size, except the number of experts."""

    num_layers: int
    num_dense_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    lb_loss_weight: float = 0.01


_TINY: Final = _Shape(
    num_layers=16, num_dense_layers=1, d_model=2048, num_heads=16, num_kv_heads=4, hidden_size=2048
)
_SMALL: Final = _Shape(
    num_layers=32, num_dense_layers=1, d_model=2560, num_heads=24, num_kv_heads=6, hidden_size=2560
)
_MEDIUM: Final = _Shape(
    num_layers=39, num_dense_layers=2, d_model=3072, num_heads=32, num_kv_heads=8, hidden_size=3072
)
_LARGE: Final = _Shape(
    num_layers=47,
    num_dense_layers=2,
    d_model=4096,
    num_heads=40,
    num_kv_heads=10,
    hidden_size=4096,
    lb_loss_weight=0.005,
)
_ULTRA: Final = _Shape(
    num_layers=63, num_dense_layers=2, d_model=6144, num_heads=64, num_kv_heads=32, hidden_size=8192
)
_EIGHT_LAYERS: Final = _Shape(
    num_layers=8, num_dense_layers=1, d_model=4096, num_heads=32, num_kv_heads=8, hidden_size=4096
)


def _olmoe3(shape: _Shape, num_experts: int) -> Options:
    """The Olmo-core 3 family: heads of width 128, top-4, one shared expert as wide as a routed one.

    Dense layers are as wide as the four chosen experts and the shared one together.
    """
    top_k = 4
    router = RouterConfig(
        top_k=top_k,
        normalize_expert_weights=1.0,
        restore_weight_scale=True,
        lb_loss_weight=shape.lb_loss_weight,
        z_loss_weight=2e-4,
    )
    return {
        "vocab_size": 100_352,
        "d_model": shape.d_model,
        "num_layers": shape.num_layers,
        "num_dense_layers": shape.num_dense_layers,
        "dense_hidden_size": (top_k + 1) * shape.hidden_size,
        "attention": AttentionConfig(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=128,
            qk_norm="head",
        ),
        "moe": MoEConfig(
            num_experts=num_experts,
            hidden_size=shape.hidden_size,
            router=router,
            shared=SharedExpertConfig(hidden_size=shape.hidden_size),
        ),
        "norm_placement": "peri",
        "scale_embedding": True,
        "norm_embedding": True,
        "lm_z_loss_weight": 1e-4,
        "init_std": 0.01,
    }


PRESETS: Final[Mapping[str, Callable[[], Options]]] = MappingProxyType(
    {
        "tiny": _tiny,
        "olmoe_1b_7b": _olmoe_1b_7b,
        "olmoe3_tiny_64e": partial(_olmoe3, _TINY, 64),
        "olmoe3_small_64e": partial(_olmoe3, _SMALL, 64),
        "olmoe3_medium_64e": partial(_olmoe3, _MEDIUM, 64),
        "olmoe3_medium_96e": partial(_olmoe3, _MEDIUM, 96),
        "olmoe3_medium_128e": partial(_olmoe3, _MEDIUM, 128),
        "olmoe3_large_128e": partial(_olmoe3, _LARGE, 128),
        "olmoe3_ultra_128e": partial(_olmoe3, _ULTRA, 128),
        "olmoe3_ultra_256e": partial(_olmoe3, _ULTRA, 256),
        "olmoe3_8l_8e": partial(_olmoe3, _EIGHT_LAYERS, 8),
        "olmoe3_8l_32e": partial(_olmoe3, _EIGHT_LAYERS, 32),
        "olmoe3_8l_48e": partial(_olmoe3, _EIGHT_LAYERS, 48),
        "olmoe3_8l_64e": partial(_olmoe3, _EIGHT_LAYERS, 64),
        "olmoe3_8l_128e": partial(_olmoe3, _EIGHT_LAYERS, 128),
    }
)
"""Options of every named model, by name; `TransformerConfig.preset` builds from them."""


def find_preset(name: str) -> Options:
    """The options of the model called `name`.

    Raises:
        ValueError: if there is none; the message lists all names.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"model preset {name!r} does not exist; {hint}choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name]()
