"""Multi-head attention with grouped key/value heads, rotary positions and optional query/key norms."""

from dataclasses import dataclass
from typing import Final

from jaxtyping import Float
from torch import Tensor, nn

from lightning_moe.config import AttentionConfig
from lightning_moe.config.layers import ATTENTION_BACKEND_NAMES
from lightning_moe.nn.norm import RMSNorm
from lightning_moe.ops.attention import AttentionFunction, AttentionMask, sdpa_attention
from lightning_moe.ops.rope import apply_rope

# A further backend of the package is one function with the signature of `sdpa_attention`, one line here, and its name
# in `config.AttentionBackend`.
ATTENTION_BACKENDS: Final[dict[str, AttentionFunction]] = {"sdpa": sdpa_attention}


def register_attention_backend(name: str, attend: AttentionFunction) -> None:
    """Let `model.attention.backend=name` mean `attend`, a function with the signature of `sdpa_attention`.

    Every process registers it before it builds a config with that name.

    Raises:
        ValueError: if the name is taken.
    """
    ATTENTION_BACKEND_NAMES.add(name)
    ATTENTION_BACKENDS[name] = attend


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What all layers of one forward share: cosines and sines of the positions, and the attention mask."""

    mask: AttentionMask
    cos_SC: Float[Tensor, "S C"] | None = None
    sin_SC: Float[Tensor, "S C"] | None = None


class Attention(nn.Module):
    """Causal self-attention.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: Linear layers; keys and values may have fewer heads than queries.
        q_norm, k_norm: RMS norms over each head or over the whole projection, or None.
    """

    def __init__(self, d_model: int, config: AttentionConfig, *, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.head_dim = config.head_dim or d_model // config.num_heads
        num_kv_heads = config.num_kv_heads or config.num_heads
        query_width, kv_width = config.num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, query_width, bias=config.bias)
        self.k_proj = nn.Linear(d_model, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(d_model, kv_width, bias=config.bias)
        self.out_proj = nn.Linear(query_width, d_model, bias=config.bias)
        self.norm_each_head = config.qk_norm == "head"
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            self.q_norm = RMSNorm(
                self.head_dim if self.norm_each_head else query_width, eps=norm_eps
            )
            self.k_norm = RMSNorm(self.head_dim if self.norm_each_head else kv_width, eps=norm_eps)
        self.attend = ATTENTION_BACKENDS[config.backend]

    def forward(
        self, x_BSD: Float[Tensor, "B S D"], context: AttentionContext
    ) -> Float[Tensor, "B S D"]:
        """Attention of each position to itself and the earlier positions that `context.mask` allows."""
        q_BHSC = self._heads(self.q_proj(x_BSD), self.q_norm)
        k_BGSC = self._heads(self.k_proj(x_BSD), self.k_norm)
        v_BGSC = self._heads(self.v_proj(x_BSD), None)
        if context.cos_SC is not None and context.sin_SC is not None:
            q_BHSC = apply_rope(q_BHSC, context.cos_SC, context.sin_SC)
            k_BGSC = apply_rope(k_BGSC, context.cos_SC, context.sin_SC)
        mixed_BHSC = self.attend(q_BHSC, k_BGSC, v_BGSC, context.mask)
        y_BSD: Tensor = self.out_proj(mixed_BHSC.transpose(1, 2).flatten(-2))
        return y_BSD

    def _heads(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """(B, S, heads * C) -> (B, heads, S, C), normed in the type it came in."""
        if norm is not None and not self.norm_each_head:
            projected = norm(projected).to(projected.dtype)
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norm_each_head:
            heads = norm(heads).to(projected.dtype)
        return heads.transpose(1, 2)
