"""The routed experts of one rank: stacked weights, grouped matmuls."""

import logging

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_moe.config import MoEConfig
from lightning_moe.ops.activations import activation_function
from lightning_moe.ops.dtypes import matmul_dtype
from lightning_moe.ops.grouped_mm import (
    GroupedMatmul,
    loop_grouped_mm,
    torch_grouped_mm,
    torch_grouped_mm_refusal,
)

_log = logging.getLogger(__name__)


class Experts(nn.Module):
    """L feed-forward networks, each applied to its own consecutive rows.

    Attributes:
        w_up_gate: (L, P, W); for swiglu, rows [0, F) make `up` and [F, 2F) `gate`; interleaved for gpt_oss_swiglu.
        w_down: (L, F, W).
        b_up_gate, b_down: (L, P) and (L, W), or None.
        expert_ids: global ids of the experts that live here, in order.
    """

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        num_experts, hidden = config.num_experts, config.hidden_size
        packed = hidden if config.activation == "relu2" else 2 * hidden
        self.config = config
        self.expert_ids = range(num_experts)
        self.w_up_gate = nn.Parameter(torch.empty(num_experts, packed, width))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.b_up_gate = (
            nn.Parameter(torch.zeros(num_experts, packed)) if config.expert_bias else None
        )
        self.b_down = nn.Parameter(torch.zeros(num_experts, width)) if config.expert_bias else None
        self.activation = activation_function(
            config.activation, alpha=config.activation_alpha, limit=config.activation_limit
        )
        self._announced: set[torch.dtype] = set()

    def forward(
        self, rows_RW: Float[Tensor, "R W"], counts_L: Int[Tensor, " L"]
    ) -> Float[Tensor, "R W"]:
        """Rows through their experts: the first counts_L[0] rows through the first expert, and so on."""
        dtype = matmul_dtype(rows_RW)
        grouped_mm = self._grouped_mm(dtype)
        packed_RP = grouped_mm(
            rows_RW.to(dtype), self.w_up_gate.to(dtype).transpose(1, 2), counts_L
        )
        if self.b_up_gate is not None:
            packed_RP = packed_RP + _rows_of(self.b_up_gate, counts_L, len(rows_RW)).to(dtype)
        out_RW = grouped_mm(self.activation(packed_RP), self.w_down.to(dtype), counts_L)
        if self.b_down is not None:
            out_RW = out_RW + _rows_of(self.b_down, counts_L, len(rows_RW)).to(dtype)
        return out_RW

    def keep_(self, expert_ids: range) -> None:
        """Keep only these experts (global ids); the others live on other ranks.

        Raises:
            ValueError: if one of them isn't here.
        """
        if expert_ids == self.expert_ids:
            return
        if not set(expert_ids) <= set(self.expert_ids):
            raise ValueError(
                f"experts {expert_ids} are not among {self.expert_ids}, which live on this rank"
            )
        first = expert_ids.start - self.expert_ids.start
        for name, parameter in list(self.named_parameters(recurse=False)):
            kept = parameter.detach()[first : first + len(expert_ids)].clone()
            setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
        self.expert_ids = expert_ids

    def _grouped_mm(self, dtype: torch.dtype) -> GroupedMatmul:
        """The matmul that `backend` names; `auto` takes torch's where it serves, else the loop, and says so once."""
        backend = self.config.backend
        if backend == "loop":
            return loop_grouped_mm
        refusal = torch_grouped_mm_refusal(dtype, (*self.w_up_gate.shape[1:], self.w_down.shape[1]))
        if refusal is None:
            return torch_grouped_mm
        if backend == "torch":
            raise ValueError(
                f"model.moe.backend=torch can't run these experts: {refusal}; use backend=auto or loop"
            )
        if dtype not in self._announced:
            self._announced.add(dtype)
            _log.info("expert backend auto takes the loop: %s", refusal)
        return loop_grouped_mm

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        num_experts, hidden, width = self.w_down.shape
        return f"experts={num_experts}, width={width}, hidden={hidden}, activation={self.config.activation}"


def _rows_of(bias_LX: Tensor, counts_L: Tensor, num_rows: int) -> Tensor:
    """The bias of each row's expert; an embedding, whose backward sorts instead of adding atomically."""
    expert_of_row = torch.searchsorted(
        counts_L.cumsum(0), torch.arange(num_rows, device=counts_L.device), right=True
    )
    return nn.functional.embedding(expert_of_row, bias_LX)
