"""The rest of the slow, obvious transformer of `reference`: rotary positions, attention, blocks, the whole model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kit.reference import Routed, linear, mlp, moe, rms_norm, softmax


def rope(row: Tensor, position: int, theta: float) -> Tensor:
    """One head's row, channels (c, c + C/2) turned by position * theta^(-2c/C)."""
    half = len(row) // 2
    first, second = [], []
    for channel in range(half):
        angle = position * theta ** (-2 * channel / len(row))
        cos, sin = math.cos(angle), math.sin(angle)
        a, b = row[channel], row[channel + half]
        first.append(a * cos - b * sin)
        second.append(b * cos + a * sin)
    return torch.stack(first + second)


def sees(query: int, key: int, *, window: int | None, documents: Sequence[int] | None) -> bool:
    """Whether position `query` may look at position `key`."""
    return (
        key <= query
        and (window is None or query - key < window)
        and (documents is None or documents[key] == documents[query])
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    documents: Sequence[int] | None = None,
) -> Tensor:
    """Of one sequence: queries (H, S, C), keys and values (G, S, C); H/G neighbouring heads share a key head."""
    heads = []
    for head in range(len(q)):
        group = head * len(k) // len(q)
        rows = []
        for position, query in enumerate(q[head]):
            seen = [
                key
                for key in range(len(k[group]))
                if sees(position, key, window=window, documents=documents)
            ]
            scores = torch.stack(
                [(query * k[group, key]).sum() / math.sqrt(len(query)) for key in seen]
            )
            shares = softmax(scores)
            rows.append(sum(share * v[group, key] for share, key in zip(shares, seen, strict=True)))
        heads.append(torch.stack(rows))
    return torch.stack(heads)


def attention_layer(
    x: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    *,
    norm_eps: float,
    documents: Sequence[int] | None,
) -> Tensor:
    """Self-attention of one sequence x (S, D), projections and norms included."""
    head_dim = config.head_dim or x.shape[1] // config.num_heads

    def heads_of(name: str) -> Tensor:
        rows = []
        for position, token in enumerate(x):
            projected = linear(token, weights, f"{name}_proj", bias=config.bias)
            qk_norm = None if name == "v" else config.qk_norm
            if qk_norm == "full":
                projected = rms_norm(projected, weights[f"{name}_norm.weight"], norm_eps)
            heads = list(projected.reshape(-1, head_dim))
            if qk_norm == "head":
                heads = [rms_norm(head, weights[f"{name}_norm.weight"], norm_eps) for head in heads]
            if name != "v" and config.rope_theta is not None:
                heads = [rope(head, position, config.rope_theta) for head in heads]
            rows.append(torch.stack(heads))
        return torch.stack(rows, dim=1)

    mixed = attention(
        heads_of("q"),
        heads_of("k"),
        heads_of("v"),
        window=config.sliding_window,
        documents=documents,
    )
    rows = [
        linear(torch.cat([head[position] for head in mixed]), weights, "out_proj", bias=config.bias)
        for position in range(len(x))
    ]
    return torch.stack(rows)


def transformer(
    ids: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    *,
    documents: Tensor | None = None,
) -> tuple[Tensor, list[list[Routed]]]:
    """Logits (B, S, V) of token ids (B, S), and per sequence what each MoE layer's router decided."""
    logits, routed = [], []
    for number, sequence in enumerate(ids):
        borders = None if documents is None else documents[number].tolist()
        rows, decisions = _sequence(sequence, weights, config, borders)
        logits.append(rows)
        routed.append(decisions)
    return torch.stack(logits), routed


def _sequence(
    ids: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    documents: Sequence[int] | None,
) -> tuple[Tensor, list[Routed]]:
    def normed(rows: Tensor, name: str, *, wanted: bool = True) -> Tensor:
        if not wanted:
            return rows
        scale = weights[f"{name}.weight"]
        return torch.stack([rms_norm(row, scale, config.norm_eps) for row in rows])

    before = config.norm_placement in ("pre", "peri")
    after = config.norm_placement in ("post", "peri")
    x = torch.stack([weights["embedding.weight"][token] for token in ids.tolist()])
    if config.scale_embedding:
        x = x * math.sqrt(config.d_model)
    x = normed(x, "embedding_norm", wanted=config.norm_embedding)
    decisions = []
    for index, layer in enumerate(config.layers):
        name = f"blocks.{index}"
        inner = normed(x, f"{name}.attention_in_norm", wanted=before)
        own = part(weights, f"{name}.attention")
        out = attention_layer(
            inner, own, layer.attention, norm_eps=config.norm_eps, documents=documents
        )
        x = x + normed(out, f"{name}.attention_out_norm", wanted=after)
        inner = normed(x, f"{name}.feed_forward_in_norm", wanted=before)
        own = part(weights, f"{name}.feed_forward")
        if hasattr(layer.feed_forward, "num_experts"):
            out, routed = moe(inner, own, layer.feed_forward, norm_eps=config.norm_eps)
            decisions.append(routed)
        else:
            up_gate, down = own["up_gate.weight"], own["down.weight"]
            rows = [mlp(token, up_gate, down, layer.feed_forward.activation) for token in inner]
            out = torch.stack(rows)
        x = x + normed(out, f"{name}.feed_forward_out_norm", wanted=after)
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    return torch.stack([head @ token for token in normed(x, "final_norm")]), decisions


def part(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of one submodule, under its own names."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}
