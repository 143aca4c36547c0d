"""Activation checkpointing that routes the same way twice."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# A recomputed forward could differ in a last bit and send a token elsewhere: with luck a shape check fails, without
# it gradients are silently wrong. So the choice of experts is saved and replayed instead of recomputed.
_routing_contexts = partial(
    create_selective_checkpoint_contexts, [torch.ops.lightning_moe.top_experts.default]
)


def recomputed(module: torch.nn.Module, *args: Any) -> Any:  # noqa: ANN401 - whatever `module` returns
    """`module(*args)`, whose activations are computed again in backward instead of being kept; routing is pinned."""
    return checkpoint(module, *args, use_reentrant=False, context_fn=_routing_contexts)
