"""One transformer layer: its attention and its feed-forward part."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    POSITIVE,
    check_bools,
    check_choices,
    check_floats,
    check_instances,
    check_ints,
    given,
)
from lightning_moe.config.moe import MoEConfig
from lightning_moe.config.names import OptionNames

QkNorm = Literal["head", "full"]
AttentionBackend = Literal["sdpa"]
Recompute = Literal["none", "block", "moe", "attention"]
Compile = Literal["none", "inductor", "aot_eager"]

ATTENTION_BACKEND_NAMES: Final = OptionNames("model.attention.backend", get_args(AttentionBackend))
"""What `lightning_moe.nn.register_attention_backend` adds to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Causal self-attention with grouped key/value heads.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of `num_heads`; None means `num_heads`.
        head_dim: width of a head, even if `rope_theta` is set; None means d_model / num_heads.
        qk_norm: RMS norm of queries and keys: `head` has one weight of width `head_dim` that all
            heads share, `full` spans the whole projected width; None has no norm.
        rope_theta: base of the rotary positions, greater than 0; None has no positions.
        sliding_window: tokens that a token attends to, itself included; None means all earlier ones.
        bias: add biases to the four projections.
        backend: what computes attention; `lightning_moe.nn.register_attention_backend` adds names.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: QkNorm | None = None
    rope_theta: float | None = 500_000.0
    sliding_window: int | None = None
    bias: bool = False
    backend: AttentionBackend | str = "sdpa"

    def __post_init__(self) -> None:
        """Check every option, then that heads divide into groups."""
        section = "model.attention"
        check_ints(section, AT_LEAST_ONE, num_heads=self.num_heads)
        check_ints(
            section,
            AT_LEAST_ONE,
            **given(
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                sliding_window=self.sliding_window,
            ),
        )
        check_choices(section, get_args(QkNorm), **given(qk_norm=self.qk_norm))
        check_floats(section, POSITIVE, **given(rope_theta=self.rope_theta))
        check_bools(section, bias=self.bias)
        ATTENTION_BACKEND_NAMES.check(self.backend)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"{section}.num_heads={self.num_heads} is not a multiple of "
                f"{section}.num_kv_heads={self.num_kv_heads}; "
                f"choose a divisor of {self.num_heads} for num_kv_heads"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: `num_kv_heads`, or `num_heads` where that is None."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def head_width(self, d_model: int) -> int:
        """Width of one head: `head_dim`, or d_model / num_heads where that is None."""
        return d_model // self.num_heads if self.head_dim is None else self.head_dim

    def check_width(self, d_model: int, *, path: str = "model.attention") -> None:
        """Check what depends on the model width.

        Args:
            d_model: width of the layer's input.
            path: full option name of this section, for the message.

        Raises:
            ValueError: if heads do not divide `d_model`, or rotary positions get an odd head.
        """
        if self.head_dim is None and d_model % self.num_heads:
            raise ValueError(
                f"model.d_model={d_model} is not a multiple of {path}.num_heads={self.num_heads}; "
                f"choose a divisor of {d_model} for num_heads, or set {path}.head_dim"
            )
        width = self.head_width(d_model)
        if self.rope_theta is not None and width % 2:
            raise ValueError(
                f"{path}.head_dim={width} is odd, but rotary positions "
                f"({path}.rope_theta={self.rope_theta}) turn pairs; choose an even head_dim, or "
                f"rope_theta=null for no positions"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """A feed-forward part that every token passes, without bias.

    Attributes:
        hidden_size: width of its hidden layer.
        activation: only `swiglu`.
    """

    hidden_size: int
    activation: Literal["swiglu"] = "swiglu"

    def __post_init__(self) -> None:
        """Check every option."""
        check_ints("model.dense", AT_LEAST_ONE, hidden_size=self.hidden_size)
        check_choices("model.dense", ("swiglu",), activation=self.activation)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """What one layer does differently from the rest of the model; None keeps the model's choice.

    In Python a section is whole: `replace(config.moe, ...)` of `dataclasses` makes one that differs
    in some options. Plain options (YAML, the command line) need only name what differs; the rest is
    that of the model's own section, in `attention` also the layer's window.

    Attributes:
        attention: replaces the layer's attention, its window included.
        moe: makes this an MoE layer of this kind.
        dense_hidden_size: makes this a dense layer of this width.
        recompute: replaces the model's `recompute` for this layer.
    """

    attention: AttentionConfig | None = None
    moe: MoEConfig | None = None
    dense_hidden_size: int | None = None
    recompute: Recompute | None = None

    def __post_init__(self) -> None:
        """Check every option, and that the layer is not both dense and MoE."""
        section = "model.layer_overrides[...]"
        check_instances(section, AttentionConfig, **given(attention=self.attention))
        check_instances(section, MoEConfig, **given(moe=self.moe))
        check_ints(section, AT_LEAST_ONE, **given(dense_hidden_size=self.dense_hidden_size))
        check_choices(section, get_args(Recompute), **given(recompute=self.recompute))
        if self.moe is not None and self.dense_hidden_size is not None:
            raise ValueError(
                f"{section}.dense_hidden_size={self.dense_hidden_size} and {section}.moe exclude "
                f"each other; a layer is either dense or MoE, unset one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer after defaults, patterns and overrides were applied.

    Attributes:
        attention: with the layer's own `sliding_window`.
        feed_forward: dense or MoE.
        recompute: the part whose activations are computed again in the backward pass.
    """

    attention: AttentionConfig
    feed_forward: MoEConfig | DenseConfig
    recompute: Recompute = "none"
