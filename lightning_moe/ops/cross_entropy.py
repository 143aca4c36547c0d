"""Next-token loss of a large vocabulary without ever holding all logits."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context
from lightning_moe.ops.dtypes import at_least_float32, matmul_dtype
from lightning_moe.ops.ranges import named_range

IGNORE_INDEX: Final = -100
CHUNK_LOGITS: Final = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedLoss:
    """Sums over the labelled tokens.

    Attributes:
        total: cross_entropy + z_weight * logz_squared; the only field with gradient.
        cross_entropy: nats.
        logz_squared: squared log-partition of the head's logits (nats squared).
    """

    total: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    logz_squared: Float[Tensor, ""]


def chunked_cross_entropy(
    hidden_TD: Float[Tensor, "T D"],
    head_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    *,
    z_weight: float = 0.0,
) -> ChunkedLoss:
    """Cross-entropy (and z-loss) of a linear head, in at least float32, a chunk of tokens at a time.

    At most about four million logits exist at once. Tokens labelled -100 count nowhere.

    Source of the z term: PaLM, arXiv:2204.02311, section 5.
    """
    with named_range("head"):
        total, cross_entropy, logz_squared = _ChunkedCrossEntropy.apply(
            hidden_TD, head_VD, labels_T, z_weight, matmul_dtype(hidden_TD)
        )
    return ChunkedLoss(total=total, cross_entropy=cross_entropy, logz_squared=logz_squared)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward, while a chunk's logits exist.

    Autograd would have to keep all logits, a checkpoint would compute them twice.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden_TD: Tensor,
        head_VD: Tensor,
        labels_T: Tensor,
        z_weight: float,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = at_least_float32(hidden_TD.dtype)
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TD) if need_hidden else None
        grad_head = (
            torch.zeros_like(head_VD, dtype=at_least_float32(head_VD.dtype)) if need_head else None
        )
        sums = torch.zeros(2, dtype=wide, device=hidden_TD.device)
        rows = max(1, CHUNK_LOGITS // head_VD.shape[0])
        head = head_VD.to(compute)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for start in range(0, hidden_TD.shape[0], rows):
                part = slice(start, start + rows)
                hidden = hidden_TD[part].to(compute)
                chunk_sums, grad_logits = _chunk(hidden @ head.t(), labels_T[part], z_weight, wide)
                sums += chunk_sums
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits.to(compute) @ head
                if grad_head is not None:
                    grad_head += grad_logits.to(compute).t() @ hidden
        ctx.save_for_backward(
            grad_hidden, None if grad_head is None else grad_head.to(head_VD.dtype)
        )
        outputs = sums[0] + z_weight * sums[1], sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, grad_total: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_head = (
            None if saved is None else saved * grad_total.to(saved.dtype)
            for saved in ctx.saved_tensors
        )
        return grad_hidden, grad_head, None, None, None


def _chunk(
    logits: Tensor, labels: Tensor, z_weight: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cross-entropy sum, squared log-partition sum) of one chunk, and the gradient of its total by the logits."""
    logits = logits.to(wide)
    counted = labels != IGNORE_INDEX
    targets = torch.where(counted, labels, 0).unsqueeze(-1)
    logz = logits.logsumexp(dim=-1)
    losses = logz - logits.gather(-1, targets).squeeze(-1)
    sums = torch.stack(
        (torch.where(counted, losses, 0.0).sum(), torch.where(counted, logz.square(), 0.0).sum())
    )
    grad = (logits - logz.unsqueeze(-1)).exp_()
    if z_weight:
        grad *= (1 + 2 * z_weight * logz).unsqueeze(-1)
    grad.scatter_(-1, targets, grad.gather(-1, targets) - 1)
    return sums, grad.masked_fill_(~counted.unsqueeze(-1), 0.0)
