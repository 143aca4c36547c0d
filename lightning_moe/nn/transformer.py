"""The MoE transformer language model."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_moe.config import AttentionConfig, TransformerConfig
from lightning_moe.nn.attention import AttentionContext
from lightning_moe.nn.block import Block
from lightning_moe.nn.init import draw_seed, give_memory_, init_weights_
from lightning_moe.nn.norm import RMSNorm
from lightning_moe.ops.attention import attention_mask
from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.records import Routing
from lightning_moe.ops.rope import rope_angles


class MoETransformer(nn.Module):
    """A decoder-only transformer whose layers may be mixtures of experts.

    Its initial weights depend on torch's seed, parameter names and expert ids only. Built under
    `torch.device("meta")` it holds no memory; after `to_empty`, call `reset_parameters`.

    Attributes:
        embedding: weight (V, D).
        blocks: the layers.
        final_norm: RMS norm before the head.
        head: Linear of weight (V, D), or None when tied to the embedding; read `head_weight`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        # On the meta device first: each weight is then drawn once, by its name in the whole model.
        with torch.device("meta"):
            self._build(config)
        if device.type != "meta":
            give_memory_(self, device)
            self.reset_parameters()

    def _build(self, config: TransformerConfig) -> None:
        width = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_scale = math.sqrt(width) if config.scale_embedding else 1.0
        self.embedding_norm = (
            RMSNorm(width, eps=config.norm_eps) if config.norm_embedding else nn.Identity()
        )
        self.blocks = nn.ModuleList(
            Block(
                width,
                layer,
                norm_placement=config.norm_placement,
                norm_eps=config.norm_eps,
                init_std=config.init_std,
                offload_activations=config.offload_activations,
                compile_backend=config.compile,
            )
            for layer in config.layers
        )
        self.final_norm = RMSNorm(width, eps=config.norm_eps)
        # A tied head has no parameter of its own, so that no copy, cast or load can separate the two.
        self.head = (
            None if config.tie_embeddings else nn.Linear(width, config.vocab_size, bias=False)
        )

    @property
    def head_weight(self) -> Float[Tensor, "V D"]:
        """Weight of the language-model head: the embedding's if they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights anew; `seed` defaults to one from torch's global generator."""
        init_weights_(self, seed=draw_seed() if seed is None else seed, std=self.config.init_std)

    def forward(
        self,
        ids_BS: Int[Tensor, "B S"],
        *,
        valid_BS: Bool[Tensor, "B S"] | None = None,
        document_ids_BS: Int[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B S V"], list[Routing]]:
        """Logits of the next token at every position, and one record per MoE layer. See `features`."""
        hidden_BSD, records = self.features(
            ids_BS, valid_BS=valid_BS, document_ids_BS=document_ids_BS
        )
        return nn.functional.linear(hidden_BSD, self.head_weight), records

    def features(
        self,
        ids_BS: Int[Tensor, "B S"],
        *,
        valid_BS: Bool[Tensor, "B S"] | None = None,
        document_ids_BS: Int[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"], list[Routing]]:
        """What the head reads, and one record per MoE layer, first layer first.

        Args:
            ids_BS: token ids.
            valid_BS: positions that count in the records (None: all).
            document_ids_BS: positions attend within equal numbers only (None: everywhere).
        """
        x_BSD = self.embedding_norm(self.embedding(ids_BS) * self.embedding_scale)
        contexts: dict[tuple[int | None, float | None, int], AttentionContext] = {}
        records = []
        for block, layer in zip(self.blocks, self.config.layers, strict=True):
            key = _context_key(layer.attention, self.config.d_model)
            if key not in contexts:
                contexts[key] = _context(key, x_BSD, document_ids_BS)
            x_BSD, routing = block(x_BSD, contexts[key], valid_BS)
            if routing is not None:
                records.append(routing)
        return self.final_norm(x_BSD), records


def _context_key(attention: AttentionConfig, d_model: int) -> tuple[int | None, float | None, int]:
    return (
        attention.sliding_window,
        attention.rope_theta,
        attention.head_dim or d_model // attention.num_heads,
    )


def _context(
    key: tuple[int | None, float | None, int], x_BSD: Tensor, document_ids_BS: Tensor | None
) -> AttentionContext:
    window, theta, head_dim = key
    length, device = x_BSD.shape[1], x_BSD.device
    mask = attention_mask(length, window=window, document_ids_BS=document_ids_BS, device=device)
    if theta is None:
        return AttentionContext(mask=mask)
    positions = torch.arange(length, device=device)
    angles = rope_angles(positions, head_dim, theta, at_least_float32(x_BSD.dtype))
    return AttentionContext(mask=mask, cos_SC=angles.cos(), sin_SC=angles.sin())
