"""Router arithmetic: scores, group limits, the choice of experts and the weights of the chosen ones.

Source: Olmo-core 3 technical report (Ai2, 2026), routing section; group limits from DeepSeek-V3, arXiv:2412.19437.
"""

import math
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context
from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.records import TokenRoutes
from lightning_moe.ops.top_experts import top_experts

SCORE_GRID: Final = 2.0**14


def router_logits(
    x_TD: Float[Tensor, "T D"],
    weight_ED: Float[Tensor, "E D"],
    bias_E: Float[Tensor, " E"] | None = None,
) -> Float[Tensor, "T E"]:
    """Logits in at least float32, whatever autocast says: bfloat16 would merge close experts into ties.

    Keeps `x_TD` as it came for backward, not its wider copy, which would take twice the memory.
    """
    logits_TE: Tensor = _Logits.apply(x_TD, weight_ED)
    return logits_TE if bias_E is None else logits_TE + bias_E.to(logits_TE.dtype)


def router_scores(
    logits_TE: Float[Tensor, "T E"],
    gating: Literal["softmax", "topk_softmax", "sigmoid"],
    *,
    sigmoid_epsilon: float = 1e-7,
) -> Float[Tensor, "T E"]:
    """Score of every expert: softmax over experts, or sigmoid plus an epsilon that keeps sums above zero."""
    if gating == "sigmoid":
        return logits_TE.sigmoid() + sigmoid_epsilon
    return logits_TE.softmax(dim=-1)


def limit_to_groups(
    selection_TE: Float[Tensor, "T E"], *, num_groups: int, groups_kept: int
) -> Float[Tensor, "T E"]:
    """Selection scores with -inf outside the best groups of experts.

    Experts form `num_groups` equal runs of consecutive ids. A group's score is the sum of its two best experts.
    """
    grouped: Tensor = selection_TE.unflatten(-1, (num_groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
    kept_groups = top_experts(best_two.sum(dim=-1), groups_kept)
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=grouped.device).scatter_(
        -1, kept_groups, False
    )
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def to_score_grid(selection_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
    """Scores rounded to multiples of 2^-14, so that noise in last bits becomes a tie, which the lowest index wins."""
    return (selection_TE * SCORE_GRID).round() / SCORE_GRID


def selection_margin(
    selection_TE: Float[Tensor, "T E"], ids_TK: Int[Tensor, "T K"]
) -> Float[Tensor, " T"]:
    """Score of the worst expert among `ids_TK` minus that of the best one outside; +inf where none is outside.

    An expert at -inf is outside of every choice. A negative margin means that scores did not decide.
    """
    worst_chosen_T = selection_TE.gather(-1, ids_TK).amin(dim=-1)
    return worst_chosen_T - selection_TE.scatter(-1, ids_TK, -torch.inf).amax(dim=-1)


def score_entropy(shares_TE: Float[Tensor, "T E"]) -> Float[Tensor, " T"]:
    """Entropy of each row of scores that add up to 1 (nats); a score of 0 adds nothing."""
    terms_TE: Tensor = torch.special.entr(shares_TE)
    return terms_TE.sum(dim=-1)


def confidence_sums(tokens: TokenRoutes) -> Float[Tensor, "4"]:
    """Over valid tokens: sum and number of finite margins, sum of entropies (nats), number of tokens; float64."""
    finite_T = tokens.valid_T & tokens.margin_T.isfinite()
    sums = [
        torch.where(finite_T, tokens.margin_T, 0.0).sum(dtype=torch.float64),
        finite_T.sum(),
        torch.where(tokens.valid_T, tokens.entropy_T, 0.0).sum(dtype=torch.float64),
        tokens.valid_T.sum(),
    ]
    return torch.stack([total.double() for total in sums])


def uniform_assignment(
    num_tokens: int, top_k: int, num_experts: int, device: torch.device
) -> Int[Tensor, "T K"]:
    """Round robin for benchmarks: token t gets experts t*K .. t*K + K-1, modulo the number of experts."""
    copies_N = torch.arange(num_tokens * top_k, device=device)
    return (copies_N % num_experts).view(num_tokens, top_k)


def expert_weights(
    chosen_TK: Float[Tensor, "T K"],
    *,
    norm_p: float | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "T K"]:
    """Weights of the chosen experts: divided by their p-norm (no epsilon) if asked, then scaled.

    A row whose largest score is too small to be squared needs `away_from_zero` first.
    """
    if norm_p is not None:
        if norm_p > 2:  # noqa: PLR2004 - higher powers of small scores are 0
            chosen_TK = chosen_TK / chosen_TK.detach().amax(dim=-1, keepdim=True)
        chosen_TK = chosen_TK / torch.linalg.vector_norm(
            chosen_TK, ord=norm_p, dim=-1, keepdim=True
        )
    return chosen_TK if scale == 1.0 else chosen_TK * scale


def away_from_zero(
    scores: Float[Tensor, "T _"], logs: Float[Tensor, "T _"]
) -> Float[Tensor, "T _"]:
    """The scores, but `logs.exp()` times a factor in rows where even the largest score is nearly 0, or 0 by rounding.

    For what doesn't depend on a factor that a row has in common: shares, and weights that will be normalized.

    Args:
        scores: of experts, none negative.
        logs: their logarithms, up to a term that a row has in common.
    """
    too_small = scores.amax(dim=-1, keepdim=True) < torch.finfo(scores.dtype).tiny ** 0.5
    return torch.where(too_small, (logs - logs.detach().amax(dim=-1, keepdim=True)).exp(), scores)


def log_sigmoid_scores(
    logits: Float[Tensor, "T _"], sigmoid_epsilon: float
) -> Float[Tensor, "T _"]:
    """Logarithm of what `router_scores` gives for sigmoid, exact where that is rounded to 0."""
    logs = torch.nn.functional.logsigmoid(logits)
    if sigmoid_epsilon == 0:
        return logs
    return torch.logaddexp(logs, torch.full_like(logs, math.log(sigmoid_epsilon)))


def count_experts(ids_TK: Int[Tensor, "T K"], num_experts: int) -> Int[Tensor, " E"]:
    """How many of the ids name each expert (int64). Ids outside the range, such as -1, count nowhere.

    A search in the sorted ids: unlike a histogram it is exact, deterministic and free of host syncs everywhere.
    """
    edges = torch.arange(num_experts + 1, device=ids_TK.device)
    return torch.searchsorted(ids_TK.flatten().sort().values, edges).diff()


class _Logits(torch.autograd.Function):
    """A matmul that repeats the cast of its input in backward instead of keeping the result."""

    @staticmethod
    def forward(ctx: Context, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = at_least_float32(x_TD.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            return x_TD.to(dtype) @ weight_ED.to(dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_x = grad_weight = None
        with torch.autocast(x_TD.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = (grad_TE @ weight_ED.to(grad_TE.dtype)).to(x_TD.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_TE.t() @ x_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
        return grad_x, grad_weight
