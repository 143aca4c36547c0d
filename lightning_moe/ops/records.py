"""The facts about one layer's routing that its forward returns."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """What one MoE layer did with one micro-batch, over its valid tokens only.

    Returned by `forward`, never accumulated inside it: recomputation, evaluation and a second forward can't
    count twice. Everything is a sum over tokens, so records of several micro-batches or ranks simply add up.

    Attributes:
        requested_E: token copies that the router sent to each expert (int64), before any capacity limit.
        kept_E: copies that were computed; equal to `requested_E` unless a dispatcher dropped some.
        score_sums_E: sum over tokens of scores that add up to 1 per token; carries gradient to the router.
        logz_squared: sum over tokens of the squared log-partition (nats squared); carries gradient when the
            layer's `z_loss_weight` is set.
        num_tokens: valid tokens (int64).
        requested_BE, score_sums_BE, num_tokens_B: the same per sequence, where the balance scope is `sequence`.
    """

    requested_E: Int[Tensor, " E"]
    kept_E: Int[Tensor, " E"]
    score_sums_E: Float[Tensor, " E"]
    logz_squared: Float[Tensor, ""]
    num_tokens: Int[Tensor, ""]
    requested_BE: Int[Tensor, "B E"] | None = None
    score_sums_BE: Float[Tensor, "B E"] | None = None
    num_tokens_B: Int[Tensor, " B"] | None = None


# Lets records pass through checkpoints, torch.compile, DDP's search for used outputs and FSDP2.
pytree.register_dataclass(Routing)
