"""Routing records by hand."""

from collections.abc import Sequence

import torch

from lightning_moe.ops import Routing, TokenRoutes


def routing_record(
    counts: Sequence[int],
    *,
    kept: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    lost: int | None = None,
    top_k: int = 1,
    tokens: TokenRoutes | None = None,
) -> Routing:
    """Of one layer that each expert was asked for so often; scores are the counts, and nothing is dropped."""
    requested_E = torch.tensor(counts)
    return Routing(
        requested_E=requested_E,
        kept_E=requested_E if kept is None else torch.tensor(kept),
        score_sums_E=torch.tensor(counts if scores is None else scores, dtype=torch.float64),
        logz_squared=torch.tensor(0.0),
        num_tokens=requested_E.sum() // top_k,
        lost_tokens=None if lost is None else torch.tensor(lost),
        tokens=tokens,
    )


def token_routes(
    margins: Sequence[float], entropies: Sequence[float], valid: Sequence[bool]
) -> TokenRoutes:
    """All to expert 0."""
    return TokenRoutes(
        ids_TK=torch.zeros(len(margins), 1, dtype=torch.int64),
        weights_TK=torch.ones(len(margins), 1),
        margin_T=torch.tensor(margins),
        entropy_T=torch.tensor(entropies),
        valid_T=torch.tensor(valid),
    )
