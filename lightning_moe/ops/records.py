"""The facts about one layer's routing that its forward returns."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoutes:
    """The experts that each token of one micro-batch was sent to, without gradient, in the order of the tokens.

    Padding is routed like any token and has its row; `valid_T` says which rows count.

    Attributes:
        ids_TK: chosen experts, best first (before any capacity limit).
        weights_TK: their weights in the layer's output.
        margin_T: selection score of the last chosen expert minus that of the best one not chosen. Scores are those
            that the choice saw: with the expert bias, on the score grid, and -inf outside the best groups.
            +inf where no other expert could have been chosen (K = E, or a group limit that leaves K); below 0 only
            where the scores did not decide (`uniform_expert_assignment`).
        entropy_T: entropy of the scores that add up to 1 per token (nats): 0 is certain, log(E) undecided.
        valid_T: whether the row counts in the sums of its `Routing`.
    """

    ids_TK: Int[Tensor, "T K"]
    weights_TK: Float[Tensor, "T K"]
    margin_T: Float[Tensor, " T"]
    entropy_T: Float[Tensor, " T"]
    valid_T: Bool[Tensor, " T"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The routing record of one MoE layer and one micro-batch: sums over its valid tokens.

    Returned by `forward`, never accumulated inside it: recomputation, evaluation and a second forward can't
    count twice. All but `tokens` are sums over tokens, so records of several micro-batches or ranks simply add up.

    Attributes:
        requested_E: token copies that the router sent to each expert (int64), before any capacity limit.
        kept_E: copies that were computed; equal to `requested_E` unless a dispatcher dropped some.
        score_sums_E: sum over tokens of scores that add up to 1 per token; carries gradient to the router.
        logz_squared: sum over tokens of the squared log-partition (nats squared); carries gradient when the
            layer's `z_loss_weight` is set.
        num_tokens: valid tokens (int64).
        requested_BE, score_sums_BE, num_tokens_B: the same per sequence, where the balance scope is `sequence`.
        lost_tokens: tokens none of whose copies were kept (int64); None from a dispatcher that never drops.
        tokens: the experts of each token, while the router's `trace` is on.
    """

    requested_E: Int[Tensor, " E"]
    kept_E: Int[Tensor, " E"]
    score_sums_E: Float[Tensor, " E"]
    logz_squared: Float[Tensor, ""]
    num_tokens: Int[Tensor, ""]
    requested_BE: Int[Tensor, "B E"] | None = None
    score_sums_BE: Float[Tensor, "B E"] | None = None
    num_tokens_B: Int[Tensor, " B"] | None = None
    lost_tokens: Int[Tensor, ""] | None = None
    tokens: TokenRoutes | None = None


# Lets records pass through checkpoints, torch.compile, DDP's search for used outputs and FSDP2.
pytree.register_dataclass(TokenRoutes)
pytree.register_dataclass(Routing)
