"""How tokens choose experts, and what keeps the choice balanced."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NON_NEGATIVE,
    POSITIVE,
    check_bools,
    check_choices,
    check_floats,
    check_ints,
    given,
)

GatingFunction = Literal["softmax", "topk_softmax", "sigmoid"]
BalanceScope = Literal[
    "sequence", "micro_batch", "global_micro_batch", "accumulated", "lagged", "exact"
]
OverLayers = Literal["sum", "mean"]

BALANCE_INVARIANCE: Final[dict[BalanceScope, tuple[str, ...]]] = {
    "sequence": ("accumulation", "ranks"),
    "micro_batch": (),
    "global_micro_batch": ("ranks",),
    "accumulated": ("ranks",),
    "lagged": ("accumulation", "ranks"),
    "exact": ("accumulation", "ranks"),
}
"""What the balance loss of each scope doesn't depend on, besides expert_parallel and recomputation."""

_ROUTER: Final = "model.moe.router"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How tokens choose experts, and what keeps the choice balanced.

    Weights of the chosen experts pass, in this order: the p-norm, times `top_k`, times
    `expert_weight_scale`, times sqrt(original_top_k / top_k).

    Attributes:
        top_k: experts per token, at least 1 and at most the number of experts.
        bias: add a learned bias to the logits.
        jitter_eps: half-width of the uniform factor on the router's input while training, in
            [0, 1); experts see the input without it.
        gating_function: scores are softmax or sigmoid over all experts; `topk_softmax` takes the
            softmax of the chosen logits only.
        normalize_expert_weights: p > 0 of the p-norm that divides the chosen weights.
        restore_weight_scale: multiply the weights by `top_k`.
        expert_weight_scale: constant factor on the weights, greater than 0.
        original_top_k: `top_k` of the model these weights come from; the weights are multiplied by
            sqrt(original_top_k / top_k).
        sigmoid_stability_epsilon: added to every sigmoid score; other gating functions have none.
        n_group: number of expert groups of group-limited routing; needs `topk_group`.
        topk_group: groups a token may choose from, in [1, n_group]; needs `n_group`.
        uniform_expert_assignment: benchmark: experts are assigned round-robin.
        random_expert_assignment: benchmark: scores are replaced by random numbers.
        quantize_scores: round the scores that select (not the weights) to multiples of 2^-14.
        bias_gamma: step of the expert bias, moved once per optimizer step; greater than 0.
        bias_centering: subtract the mean of the expert bias after each move. No choice changes, but
            the bias, whose mean drifts otherwise, keeps its precision; needs `bias_gamma`.
        score_correction_bias: keep a expert bias even when `bias_gamma` does not move it.
        lb_loss_weight: weight of the balance loss; None computes none.
        lb_loss_scope: the tokens over which expert counts of the balance loss are taken.
            `sequence`: each sequence. `micro_batch`: those of one rank. `global_micro_batch`: those of
            all ranks. `accumulated`: of all ranks, in this micro-batch and those before it in the same
            optimizer step. `lagged`: the whole optimizer step before. `exact`: the whole optimizer
            step, counted by a forward without gradients ahead of its first backward; needs
            `lb_loss_weight`, while the others also serve to watch the balance without a weight. What each
            of them does not depend on is in `BALANCE_INVARIANCE`.
        lb_loss_over_layers: whether the balance losses of all MoE layers are added up, or averaged; the
            mean keeps one `lb_loss_weight` right for models of any depth.
        z_loss_weight: weight of the squared log-partition (nats squared) per token.
        orth_loss_weight: weight of the squared cosine between the router's rows.
    """

    top_k: int = 1
    bias: bool = False
    jitter_eps: float | None = None
    gating_function: GatingFunction = "softmax"
    normalize_expert_weights: float | None = None
    restore_weight_scale: bool = False
    expert_weight_scale: float | None = None
    original_top_k: int | None = None
    sigmoid_stability_epsilon: float = 1e-7
    n_group: int | None = None
    topk_group: int | None = None
    uniform_expert_assignment: bool = False
    random_expert_assignment: bool = False
    quantize_scores: bool = False
    bias_gamma: float | None = None
    bias_centering: bool = False
    score_correction_bias: bool = False
    lb_loss_weight: float | None = None
    lb_loss_scope: BalanceScope = "micro_batch"
    lb_loss_over_layers: OverLayers = "sum"
    z_loss_weight: float | None = None
    orth_loss_weight: float | None = None

    def __post_init__(self) -> None:
        """Check every option, then the relations between them."""
        self._check_values()
        self._check_groups()
        self._check_benchmark_assignment()

    @property
    def has_score_bias(self) -> bool:
        """Whether the router keeps a bias that takes part in selection but not in the weights."""
        return self.bias_gamma is not None or self.score_correction_bias

    def check_num_experts(self, num_experts: int) -> None:
        """Check what depends on the number of experts.

        Raises:
            ValueError: if a token can't choose so many of them, or groups of equal size can't be made.
        """
        if self.top_k > num_experts:
            raise ValueError(
                f"{_ROUTER}.top_k={self.top_k} is more than model.moe.num_experts={num_experts}; "
                f"choose top_k in [1, {num_experts}] or more experts"
            )
        if self.n_group is None or self.topk_group is None:
            return
        if num_experts % self.n_group:
            raise ValueError(
                f"model.moe.num_experts={num_experts} is not a multiple of "
                f"{_ROUTER}.n_group={self.n_group}; choose a divisor of {num_experts} for n_group"
            )
        reachable = self.topk_group * (num_experts // self.n_group)
        if self.top_k > reachable:
            raise ValueError(
                f"{_ROUTER}.top_k={self.top_k} is more than the {reachable} experts in "
                f"{_ROUTER}.topk_group={self.topk_group} of {_ROUTER}.n_group={self.n_group} "
                f"groups (model.moe.num_experts={num_experts}); lower top_k or raise topk_group"
            )

    def _check_values(self) -> None:
        check_ints(
            _ROUTER,
            AT_LEAST_ONE,
            top_k=self.top_k,
            **given(
                original_top_k=self.original_top_k, n_group=self.n_group, topk_group=self.topk_group
            ),
        )
        check_bools(
            _ROUTER,
            bias=self.bias,
            restore_weight_scale=self.restore_weight_scale,
            uniform_expert_assignment=self.uniform_expert_assignment,
            random_expert_assignment=self.random_expert_assignment,
            quantize_scores=self.quantize_scores,
            score_correction_bias=self.score_correction_bias,
            bias_centering=self.bias_centering,
        )
        check_floats(_ROUTER, BELOW_ONE, **given(jitter_eps=self.jitter_eps))
        check_floats(
            _ROUTER,
            POSITIVE,
            **given(
                normalize_expert_weights=self.normalize_expert_weights,
                expert_weight_scale=self.expert_weight_scale,
                bias_gamma=self.bias_gamma,
            ),
        )
        check_floats(
            _ROUTER,
            NON_NEGATIVE,
            sigmoid_stability_epsilon=self.sigmoid_stability_epsilon,
            **given(
                lb_loss_weight=self.lb_loss_weight,
                z_loss_weight=self.z_loss_weight,
                orth_loss_weight=self.orth_loss_weight,
            ),
        )
        check_choices(_ROUTER, get_args(GatingFunction), gating_function=self.gating_function)
        check_choices(_ROUTER, get_args(BalanceScope), lb_loss_scope=self.lb_loss_scope)
        check_choices(_ROUTER, get_args(OverLayers), lb_loss_over_layers=self.lb_loss_over_layers)
        if self.bias_centering and self.bias_gamma is None:
            raise ValueError(
                f"{_ROUTER}.bias_centering=True has no effect with {_ROUTER}.bias_gamma=None, which never "
                "moves the bias; set bias_gamma, or unset bias_centering"
            )
        if self.lb_loss_scope == "exact" and not self.lb_loss_weight:
            raise ValueError(
                f"{_ROUTER}.lb_loss_scope=exact counts a step ahead by a second forward, for nothing with "
                f"{_ROUTER}.lb_loss_weight={self.lb_loss_weight}; set lb_loss_weight, or choose another lb_loss_scope"
            )

    def _check_groups(self) -> None:
        if self.n_group is None and self.topk_group is None:
            return
        if self.n_group is None or self.topk_group is None:
            raise ValueError(
                f"{_ROUTER}.n_group={self.n_group} and {_ROUTER}.topk_group={self.topk_group} "
                f"go together; set both for group-limited routing, or neither"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"{_ROUTER}.topk_group={self.topk_group} is more than "
                f"{_ROUTER}.n_group={self.n_group}; choose topk_group in [1, {self.n_group}]"
            )
        if self.gating_function == "topk_softmax":
            raise ValueError(
                f"{_ROUTER}.n_group={self.n_group} does not work with "
                f"{_ROUTER}.gating_function='topk_softmax'; choose softmax or sigmoid, or unset "
                f"n_group and topk_group"
            )

    def _check_benchmark_assignment(self) -> None:
        if not self.random_expert_assignment:
            return
        if self.uniform_expert_assignment:
            raise ValueError(
                f"{_ROUTER}.uniform_expert_assignment=True and "
                f"{_ROUTER}.random_expert_assignment=True exclude each other; switch one off"
            )
        if self.gating_function == "topk_softmax":
            raise ValueError(
                f"{_ROUTER}.random_expert_assignment=True does not work with "
                f"{_ROUTER}.gating_function='topk_softmax'; choose softmax or sigmoid"
            )
