"""The router: which experts a token goes to, with what weight."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_moe.config import RouterConfig
from lightning_moe.ops import routing as ops
from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.losses import router_z_loss
from lightning_moe.ops.records import Routing, TokenRoutes
from lightning_moe.ops.top_experts import top_experts

# Its square is far from where float32 ends.
_SAFE_EPSILON: Final = 1e-15


class Router(nn.Module):
    """Scores all experts for each token and chooses `top_k` of them.

    Its parameters stay at least float32 under every cast and its arithmetic ignores autocast: rounding to bfloat16
    would merge close scores into ties. `score_bias` is float32 always; it takes part in the choice, never in weights.

    Attributes:
        weight: (E, D).
        bias: (E) added to logits, or None.
        score_bias: (E) the expert bias, a persistent buffer added to selection scores, or None;
            `RouterBiasCorrection` moves it.
        trace: whether records tell the route of each token (`Routing.tokens`). It changes no result and costs nothing
            while off. A callback that needs it turns it on in `on_train_batch_start` for the steps that it wants,
            and off in `on_train_batch_end`: so that several callbacks can share it.
    """

    def __init__(self, d_model: int, num_experts: int, config: RouterConfig) -> None:
        super().__init__()
        if config.top_k > num_experts:
            raise ValueError(
                f"model.moe.router.top_k={config.top_k} is more than model.moe.num_experts={num_experts}; "
                "lower top_k or add experts"
            )
        _warn_of_constant_weights(config)
        self.config = config
        self.num_experts = num_experts
        dtype = at_least_float32(torch.get_default_dtype())
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_experts, dtype=dtype)) if config.bias else None
        self.score_bias: Tensor | None
        bias = torch.zeros(num_experts, dtype=torch.float32) if config.has_score_bias else None
        self.register_buffer("score_bias", bias)
        self.weight_scale = _weight_scale(config)
        self.trace = False
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.06, b=0.06)

    def forward(
        self, x: Float[Tensor, "*rows D"], valid: Bool[Tensor, "*rows"] | None = None
    ) -> tuple[Float[Tensor, "*rows K"], Int[Tensor, "*rows K"], Routing]:
        """Weights and ids of the chosen experts, best first, and the record of this call.

        Args:
            x: tokens; with three dimensions the first one counts sequences, with two all rows are one sequence.
            valid: tokens to count in the record; None counts all. Others are routed all the same, since later
                tokens may attend to them.
        """
        rows = x.shape[:-1]
        valid_T = None if valid is None else valid.flatten()
        logits_TE = ops.router_logits(self._jittered(x.flatten(0, -2)), self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            scores_TE = self._scores(logits_TE)
            selection_TE = self._selection(logits_TE, scores_TE)
            ids_TK = self._choose(selection_TE)
            weights_TK = self._weights(logits_TE, scores_TE, ids_TK)
            shares_TE = self._shares(logits_TE, scores_TE)
            record = self._record(
                logits_TE, shares_TE, ids_TK, valid_T, num_sequences=math.prod(rows[:-1])
            )
            if self.trace:
                tokens = _token_routes(selection_TE, shares_TE, ids_TK, weights_TK, valid_T)
                record = dataclasses.replace(record, tokens=tokens)
        return weights_TK.unflatten(0, rows), ids_TK.unflatten(0, rows), record

    def _jittered(self, x_TD: Tensor) -> Tensor:
        epsilon = self.config.jitter_eps
        if not epsilon or not self.training:
            return x_TD
        return x_TD * torch.empty_like(x_TD).uniform_(1 - epsilon, 1 + epsilon)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        config = self.config
        scores_TE = ops.router_scores(
            logits_TE, config.gating_function, sigmoid_epsilon=config.sigmoid_stability_epsilon
        )
        if config.random_expert_assignment:
            return scores_TE * 0 + torch.rand_like(scores_TE)
        return scores_TE

    @torch.no_grad()
    def _selection(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        config = self.config
        selection_TE = logits_TE if config.gating_function == "topk_softmax" else scores_TE
        if self.score_bias is not None:
            selection_TE = selection_TE + self.score_bias
        if config.quantize_scores:
            selection_TE = ops.to_score_grid(selection_TE)
        if config.n_group is not None and config.topk_group is not None:
            selection_TE = ops.limit_to_groups(
                selection_TE, num_groups=config.n_group, groups_kept=config.topk_group
            )
        return selection_TE

    def _choose(self, selection_TE: Tensor) -> Tensor:
        top_k = self.config.top_k
        if self.config.uniform_expert_assignment:
            return ops.uniform_assignment(
                len(selection_TE), top_k, self.num_experts, selection_TE.device
            )
        return top_experts(selection_TE, top_k)

    def _shares(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """Scores that add up to 1 per token."""
        if self.config.gating_function != "sigmoid":
            return scores_TE
        if self._scores_may_vanish:
            scores_TE = ops.away_from_zero(scores_TE, self._log_scores(logits_TE))
        return scores_TE / scores_TE.sum(dim=-1, keepdim=True)

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        norm_p = self.config.normalize_expert_weights
        if self.config.gating_function == "topk_softmax":
            chosen_TK = logits_TE.gather(-1, ids_TK).softmax(dim=-1)
        else:
            chosen_TK = scores_TE.gather(-1, ids_TK)
            if norm_p is not None and self._scores_may_vanish:
                logs_TK = self._log_scores(logits_TE.gather(-1, ids_TK))
                chosen_TK = ops.away_from_zero(chosen_TK, logs_TK)
        return ops.expert_weights(chosen_TK, norm_p=norm_p, scale=self.weight_scale)

    @property
    def _scores_may_vanish(self) -> bool:
        """Whether all scores that are to be normalized can be rounded to 0."""
        config = self.config
        if config.random_expert_assignment:
            return False
        if config.gating_function == "sigmoid":
            return config.sigmoid_stability_epsilon < _SAFE_EPSILON
        # The best of all experts has a score of 1 / E at least, but others may be chosen.
        return config.has_score_bias or config.uniform_expert_assignment

    def _log_scores(self, logits: Tensor) -> Tensor:
        """Up to a term that a token has in common."""
        if self.config.gating_function != "sigmoid":
            return logits
        return ops.log_sigmoid_scores(logits, self.config.sigmoid_stability_epsilon)

    def _record(
        self,
        logits_TE: Tensor,
        shares_TE: Tensor,
        ids_TK: Tensor,
        valid_T: Tensor | None,
        *,
        num_sequences: int,
    ) -> Routing:
        num_tokens = torch.full((), len(ids_TK), device=ids_TK.device)
        if valid_T is not None:
            num_tokens = valid_T.sum()
            shares_TE = torch.where(valid_T[:, None], shares_TE, 0.0)
            ids_TK = torch.where(valid_T[:, None], ids_TK, -1)
        # Without a z-loss weight no loss reads this gradient, whose graph would keep the logits in memory.
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self.config.z_loss_weight)):
            logz_squared = router_z_loss(logits_TE, valid_T)
        requested_E = ops.count_experts(ids_TK, self.num_experts)
        record = Routing(
            requested_E=requested_E,
            kept_E=requested_E,
            score_sums_E=shares_TE.sum(dim=0),
            logz_squared=logz_squared,
            num_tokens=num_tokens,
        )
        if self.config.lb_loss_scope != "sequence":
            return record
        return _with_sequences(record, shares_TE, ids_TK, valid_T, num_sequences)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "Router":  # not Self, which beartype can't check
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            wanted = torch.float32 if tensor is self.score_bias else at_least_float32(moved.dtype)
            if moved.dtype == wanted or not moved.is_floating_point():
                return moved
            # The values come from the tensor itself: those that `fn` returned have been rounded already.
            return (
                moved.to(wanted) if tensor.is_meta else tensor.to(device=moved.device, dtype=wanted)
            )

        super()._apply(keep_wide, recurse)
        return self

    def _load_from_state_dict(self, *args: object) -> None:
        super()._load_from_state_dict(*args)
        # load_state_dict(assign=True) has taken the given tensors as they are, low precision included.
        self._apply(lambda tensor: tensor)

    def extra_repr(self) -> str:
        """Sizes and the gate, for `print(model)`."""
        config = self.config
        return f"experts={self.num_experts}, top_k={config.top_k}, gating={config.gating_function}"


@cache  # each config once
def _warn_of_constant_weights(config: RouterConfig) -> None:
    """Warn of a router that the loss of the model can't train."""
    if config.top_k > 1 or config.uniform_expert_assignment:
        return
    if config.gating_function == "topk_softmax":
        name, remedy = "gating_function='topk_softmax'", "choose softmax or sigmoid"
    elif config.normalize_expert_weights is not None:
        name = f"normalize_expert_weights={config.normalize_expert_weights}"
        remedy = "unset normalize_expert_weights"
    else:
        return
    warnings.warn(
        f"model.moe.router.top_k=1 with model.moe.router.{name} makes every weight constant: the router gets no "
        f"gradient from the loss of the model, only from losses of its own; {remedy}, or raise top_k",
        stacklevel=2,
    )


def _weight_scale(config: RouterConfig) -> float:
    """top_k, then the free factor, then sqrt(original_top_k / top_k): each where it is asked for."""
    scale = float(config.top_k) if config.restore_weight_scale else 1.0
    if config.expert_weight_scale is not None:
        scale *= config.expert_weight_scale
    if config.original_top_k is not None:
        scale *= math.sqrt(config.original_top_k / config.top_k)
    return scale


@torch.no_grad()
def _token_routes(
    selection_TE: Tensor,
    shares_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    valid_T: Tensor | None,
) -> TokenRoutes:
    everything = torch.ones(len(ids_TK), dtype=torch.bool, device=ids_TK.device)
    return TokenRoutes(
        ids_TK=ids_TK,
        weights_TK=weights_TK.detach(),
        margin_T=ops.selection_margin(selection_TE, ids_TK),
        entropy_T=ops.score_entropy(shares_TE),
        valid_T=everything if valid_T is None else valid_T,
    )


def _with_sequences(
    record: Routing, shares_TE: Tensor, ids_TK: Tensor, valid_T: Tensor | None, num_sequences: int
) -> Routing:
    num_experts = shares_TE.shape[1]
    shares_BSE = shares_TE.unflatten(0, (num_sequences, -1))
    ids_BN = ids_TK.reshape(num_sequences, -1)
    offsets_B1 = torch.arange(num_sequences, device=ids_TK.device)[:, None] * num_experts
    numbered = torch.where(ids_BN >= 0, ids_BN + offsets_B1, -1)
    counts = ops.count_experts(numbered, num_sequences * num_experts)
    if valid_T is None:
        tokens_B = torch.full((num_sequences,), shares_BSE.shape[1], device=ids_TK.device)
    else:
        tokens_B = valid_T.unflatten(0, (num_sequences, -1)).sum(dim=1)
    return dataclasses.replace(
        record,
        requested_BE=counts.unflatten(0, (num_sequences, num_experts)),
        score_sums_BE=shares_BSE.sum(dim=1),
        num_tokens_B=tokens_B,
    )
