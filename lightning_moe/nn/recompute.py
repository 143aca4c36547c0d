"""Activation checkpointing that repeats the choice of experts instead of computing it again."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

T = TypeVar("T")

# A recomputed forward could differ in a last bit and send a token to another expert: at best a shape check fails, at
# worst gradients are silently wrong. So the choice of experts is saved and replayed.
_routing_contexts = partial(
    create_selective_checkpoint_contexts, [torch.ops.lightning_moe.top_experts.default]
)


def recomputed(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, whose activations are computed again in backward instead of being kept.

    The choice of experts and random numbers repeat. Ranks that share experts dispatch a second time during backward,
    so all of them must recompute the same layers.
    """
    result: T = checkpoint(function, *args, use_reentrant=False, context_fn=_routing_contexts)
    return result
