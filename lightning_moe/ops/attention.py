"""Scaled dot-product attention, causal, with optional windows and document borders."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_moe.ops.dtypes import matmul_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMask:
    """Which positions each position attends to; None means plain causal attention."""

    allowed_BHSS: Bool[Tensor, "B 1 S S"] | None = None


AttentionFunction = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]


def attention_mask(
    length: int,
    *,
    window: int | None,
    document_ids_BS: Int[Tensor, "B S"] | None,
    device: torch.device,
) -> AttentionMask:
    """The mask of one forward, shared by all layers with the same window.

    A position attends to itself and earlier positions, at most `window` in all, of its own document.
    """
    if document_ids_BS is None and (window is None or window >= length):
        return AttentionMask()
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    allowed = key <= query
    if window is not None:
        # Not by the difference of the two, which would be (S, S) in int64.
        allowed &= key > query - window
    allowed_BHSS = allowed[None, None]
    if document_ids_BS is not None:
        same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
        allowed_BHSS = same.logical_and_(allowed_BHSS)
    return AttentionMask(allowed_BHSS=allowed_BHSS)


def sdpa_attention(
    q_BHSC: Float[Tensor, "B H S C"],
    k_BGSC: Float[Tensor, "B G S C"],
    v_BGSC: Float[Tensor, "B G S C"],
    mask: AttentionMask,
) -> Float[Tensor, "B H S C"]:
    """Attention through torch, which picks its fastest kernel. G key/value heads serve H/G query heads each."""
    allowed, repeats = mask.allowed_BHSS, q_BHSC.shape[1] // k_BGSC.shape[1]
    if (
        repeats > 1
        and q_BHSC.is_cuda
        and (allowed is not None or matmul_dtype(q_BHSC) == torch.float32)
    ):
        # torch 2.13's kernel for masks and for float32 has no grouped heads: without this all scores, (B, H, S, S),
        # would be in memory, several times.
        k_BGSC, v_BGSC = (heads.repeat_interleave(repeats, dim=1) for heads in (k_BGSC, v_BGSC))
    return torch.nn.functional.scaled_dot_product_attention(
        q_BHSC,
        k_BGSC,
        v_BGSC,
        attn_mask=allowed,
        is_causal=allowed is None,
        enable_gqa=q_BHSC.shape[1] != k_BGSC.shape[1],
    )
