"""A slow, obvious MoE layer in float64: what every faster path must equal; `reference_model` has the model around it.

Written from the formulas, one token, one head and one choice at a time. It shares no code with the package: a
config is only read, as a bag of numbers, and weights come in under the names of a state dict. Autograd works.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


@dataclass
class Routed:
    """What the router decided.

    Attributes:
        weights: (T, K), best first.
        ids: (T, K).
        shares: (T, E) scores that add up to 1 per token.
        logz: (T) log-partition of the logits.
    """

    weights: Tensor
    ids: Tensor
    shares: Tensor
    logz: Tensor


def best(scores: Sequence[float], k: int) -> list[int]:
    """Positions of the k highest scores, highest first; of equal ones the lowest position."""
    return sorted(range(len(scores)), key=lambda position: (-scores[position], position))[:k]


def softmax(logits: Tensor) -> Tensor:
    """Of one row."""
    powers = torch.exp(logits - logits.max().detach())
    return powers / powers.sum()


def log_partition(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of one row."""
    shift = logits.max().detach()
    return torch.log(torch.exp(logits - shift).sum()) + shift


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function."""
    return 1 / (1 + torch.exp(-x))


def router(
    x: Tensor,
    weight: Tensor,
    config: Any,
    *,
    bias: Tensor | None = None,
    score_bias: Tensor | None = None,
) -> Routed:
    """Route tokens x (T, D) with a router weight (E, D), token by token."""
    weights, ids, shares, logz = [], [], [], []
    for token in x:
        logits = torch.stack([(token * row).sum() for row in weight])
        if bias is not None:
            logits = logits + bias
        scores = softmax(logits)
        if config.gating_function == "sigmoid":
            scores = sigmoid(logits) + config.sigmoid_stability_epsilon
        selection = (logits if config.gating_function == "topk_softmax" else scores).tolist()
        if score_bias is not None:
            selection = [a + b for a, b in zip(selection, score_bias.tolist(), strict=True)]
        if config.quantize_scores:
            selection = [round(score * 2**14) / 2**14 for score in selection]
        if config.n_group is not None:
            selection = within_groups(selection, config.n_group, config.topk_group)
        chosen = best(selection, config.top_k)
        ids.append(chosen)
        weights.append(choice_weights(logits, scores, chosen, config))
        shares.append(scores / scores.sum())
        logz.append(log_partition(logits))
    return Routed(torch.stack(weights), torch.tensor(ids), torch.stack(shares), torch.stack(logz))


def within_groups(selection: list[float], num_groups: int, groups_kept: int) -> list[float]:
    """Minus infinity outside the groups whose two best members have the highest sums."""
    size = len(selection) // num_groups
    sums = []
    for group in range(num_groups):
        members = sorted(selection[group * size : (group + 1) * size], reverse=True)
        sums.append(sum(members[:2]))
    kept = best(sums, groups_kept)
    return [s if e // size in kept else -math.inf for e, s in enumerate(selection)]


def choice_weights(
    logits: Tensor,
    scores: Tensor,
    chosen: list[int],
    config: Any,
) -> Tensor:
    """Weights of the chosen experts of one token."""
    weights = torch.stack([scores[expert] for expert in chosen])
    if config.gating_function == "topk_softmax":
        weights = softmax(torch.stack([logits[expert] for expert in chosen]))
    p = config.normalize_expert_weights
    if p is not None:
        weights = weights / (weights.abs() ** p).sum() ** (1 / p)
    if config.restore_weight_scale:
        weights = weights * config.top_k
    if config.expert_weight_scale is not None:
        weights = weights * config.expert_weight_scale
    if config.original_top_k is not None:
        weights = weights * math.sqrt(config.original_top_k / config.top_k)
    return weights


def count(ids: Tensor, num_experts: int) -> list[int]:
    """How often each expert was chosen."""
    chosen = ids.flatten().tolist()
    return [chosen.count(expert) for expert in range(num_experts)]


def balance_loss(ids: Tensor, shares: Tensor) -> Tensor:
    """Mean per token: E * sum_e (share of copies sent to e) * (mean score of e)."""
    num_tokens, num_experts = shares.shape
    loss = shares.new_zeros(())
    for expert, copies in enumerate(count(ids, num_experts)):
        loss = loss + (copies / ids.numel()) * shares[:, expert].sum() / num_tokens
    return num_experts * loss


def z_loss(logz: Tensor) -> Tensor:
    """Mean squared log-partition per token."""
    return (logz**2).sum() / len(logz)


def orthogonality_loss(weight: Tensor) -> Tensor:
    """Mean squared cosine of all ordered pairs of different rows."""
    squares = []
    for i, first in enumerate(weight):
        for j, second in enumerate(weight):
            if i != j:
                lengths = (first**2).sum().sqrt() * (second**2).sum().sqrt()
                squares.append(((first * second).sum() / lengths) ** 2)
    return torch.stack(squares).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over labelled rows of minus the log-probability of the label (nats)."""
    total = logits.new_zeros(())
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label != IGNORED:
            total = total + log_partition(row) - row[label]
    return total


def activate(
    packed: Tensor, name: str, *, alpha: float = 1.702, limit: float | None = None
) -> Tensor:
    """Activation of one packed row."""
    if name == "relu2":
        return torch.where(packed > 0, packed, torch.zeros_like(packed)) ** 2
    half = len(packed) // 2
    if name == "swiglu":
        up, gate = packed[:half], packed[half:]
        return up * gate * sigmoid(gate)
    gate = torch.stack([packed[2 * i] for i in range(half)])
    up = torch.stack([packed[2 * i + 1] for i in range(half)])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * sigmoid(alpha * gate)


def mlp(token: Tensor, up_gate: Tensor, down: Tensor, activation: str) -> Tensor:
    """A dense feed-forward network on one token, weights (P, D) and (D, F)."""
    return down @ activate(up_gate @ token, activation)


def expert(token: Tensor, weights: Mapping[str, Tensor], index: int, config: Any) -> Tensor:
    """Expert number `index` on one token."""
    packed = weights["experts.w_up_gate"][index] @ token
    if config.expert_bias:
        packed = packed + weights["experts.b_up_gate"][index]
    hidden = activate(
        packed, config.activation, alpha=config.activation_alpha, limit=config.activation_limit
    )
    out = hidden @ weights["experts.w_down"][index]
    return out + weights["experts.b_down"][index] if config.expert_bias else out


def moe(
    x: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    *,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Routed]:
    """A mixture-of-experts layer on tokens x (T, D): a loop over tokens, and one over their choices."""
    routed = router(
        x,
        weights["router.weight"],
        config.router,
        bias=weights["router.bias"] if config.router.bias else None,
        score_bias=weights["router.score_bias"] if config.router.has_score_bias else None,
    )
    rows = []
    for number, token in enumerate(x):
        inner = token
        if config.latent is not None:
            inner = linear(token, weights, "latent.down", bias=config.latent.bias)
        mixed = torch.zeros_like(inner)
        for choice, index in enumerate(routed.ids[number].tolist()):
            mixed = mixed + routed.weights[number, choice] * expert(inner, weights, index, config)
        if config.latent is not None:
            if config.latent.norm:
                # A layer norm is the RMS norm of what is left after the mean.
                mean = mixed.mean() if config.latent.norm == "layer" else 0.0
                eps = norm_eps if config.latent.norm_eps is None else config.latent.norm_eps
                mixed = rms_norm(mixed - mean, weights["latent.norm.weight"], eps)
                mixed = mixed + (weights["latent.norm.bias"] if config.latent.norm_bias else 0.0)
            mixed = linear(mixed, weights, "latent.up", bias=config.latent.bias)
        if config.shared is not None:
            up_gate, down = weights["shared.up_gate.weight"], weights["shared.down.weight"]
            mixed = mixed + mlp(token, up_gate, down, config.shared.activation)
        rows.append(mixed)
    return torch.stack(rows), routed


def linear(token: Tensor, weights: Mapping[str, Tensor], name: str, *, bias: bool) -> Tensor:
    """Matrix `name`.weight times one token, plus `name`.bias if asked for."""
    out = weights[f"{name}.weight"] @ token
    return out + weights[f"{name}.bias"] if bias else out


def rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One row over the root of its mean square, times a weight."""
    return row / torch.sqrt((row**2).mean() + eps) * weight
