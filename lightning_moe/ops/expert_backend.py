"""The two matmuls of the experts: what a backend is, and the backend around any grouped matmul."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Num, UInt8
from torch import Tensor

from lightning_moe.ops.grouped_mm import GroupedMatmul


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Weights of L feed-forward networks, as parameters: not yet cast to the type of the rows.

    Attributes:
        w_up_gate_LPW, w_down_LFW: the two matrices.
        b_up_gate_LP, b_down_LW: biases, or None.
        activation: between the two, from (R, P) to (R, F).
        training: the module's mode; callbacks may swap in other values for evaluation.
    """

    w_up_gate_LPW: Float[Tensor, "L P W"]
    w_down_LFW: Float[Tensor, "L F W"]
    b_up_gate_LP: Float[Tensor, "L P"] | None
    b_down_LW: Float[Tensor, "L W"] | None
    activation: Callable[[Tensor], Tensor]
    training: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """What decides whether a backend can run some experts.

    Attributes:
        dtype: of the rows in the matmuls.
        device: of rows and weights.
        width, hidden, packed: W, F and P.
        activation: its name.
        bias: whether experts have biases.
    """

    dtype: torch.dtype
    device: torch.device
    width: int
    hidden: int
    packed: int
    activation: str
    bias: bool


@runtime_checkable
class ExpertBackend(Protocol):
    """Computes experts one way; one object per module, which may keep derived weights.

    Attributes:
        note: for the log, beside its name; may be empty.
    """

    @property
    def note(self) -> str:
        """See above."""
        ...

    def refusal(self, sizes: ExpertSizes) -> str | None:
        """Why it can't run these experts, or None if it can."""
        ...

    def host_waits(self, sizes: ExpertSizes) -> int:
        """How often forward and backward of these experts make the host wait for a GPU."""
        ...

    def encode(self, x_TW: Float[Tensor, "T W"], dtype: torch.dtype) -> Num[Tensor, "T _"]:
        """Tokens as they travel to experts that compute in `dtype`: as they are, or in bytes, each row by itself.

        Bytes of zeros stand for a row of zeros.
        """
        ...

    def __call__(
        self,
        rows_RW: Float[Tensor, "R W"],
        weights: ExpertWeights,
        counts_L: Int[Tensor, " L"],
        bytes_RZ: UInt8[Tensor, "R Z"] | None = None,
    ) -> Float[Tensor, "R W"]:
        """Rows through their experts: the first counts_L[0] rows through the first expert, and so on.

        With `bytes_RZ`, made by `encode`, values are read from there; `rows_RW` gets the gradient all the same.
        """
        ...

    def forget(self) -> None:
        """Drop what is derived from the weights, which may have changed without a trace."""
        ...


class MatmulBackend:
    """Experts as two calls of a grouped matmul, in the type of the rows.

    Args:
        grouped_mm: the matmul.
        refusal: why it can't serve these sizes, or None.
        host_waits: how often one call, with its backward, makes the host wait for a GPU; never if not given.
    """

    def __init__(
        self,
        grouped_mm: GroupedMatmul,
        refusal: Callable[[ExpertSizes], str | None],
        *,
        host_waits: Callable[[ExpertSizes], int] = lambda _: 0,
    ) -> None:
        self.note = ""
        self._grouped_mm = grouped_mm
        self._refusal = refusal
        self._host_waits = host_waits

    def refusal(self, sizes: ExpertSizes) -> str | None:
        """See `ExpertBackend.refusal`."""
        return self._refusal(sizes)

    def host_waits(self, sizes: ExpertSizes) -> int:
        """See `ExpertBackend.host_waits`."""
        return 2 * self._host_waits(sizes)

    def encode(self, x_TW: Float[Tensor, "T W"], dtype: torch.dtype) -> Float[Tensor, "T W"]:
        """See `ExpertBackend.encode`; rows travel as they are."""
        return x_TW

    def __call__(
        self,
        rows_RW: Float[Tensor, "R W"],
        weights: ExpertWeights,
        counts_L: Int[Tensor, " L"],
        bytes_RZ: UInt8[Tensor, "R Z"] | None = None,
    ) -> Float[Tensor, "R W"]:
        """See `ExpertBackend.__call__`."""
        assert bytes_RZ is None  # `encode` makes none
        dtype = rows_RW.dtype
        packed_RP = self._grouped_mm(
            rows_RW, weights.w_up_gate_LPW.to(dtype).transpose(1, 2), counts_L
        )
        if weights.b_up_gate_LP is not None:
            packed_RP = packed_RP + _rows_of(weights.b_up_gate_LP, counts_L, len(rows_RW)).to(dtype)
        hidden_RF = weights.activation(packed_RP)
        out_RW = self._grouped_mm(hidden_RF, weights.w_down_LFW.to(dtype), counts_L)
        if weights.b_down_LW is not None:
            out_RW = out_RW + _rows_of(weights.b_down_LW, counts_L, len(rows_RW)).to(dtype)
        return out_RW

    def forget(self) -> None:
        """Nothing is kept."""


def _rows_of(bias_LX: Tensor, counts_L: Tensor, num_rows: int) -> Tensor:
    """The bias of each row's expert, by an embedding: its backward sorts, where that of an index adds atomically."""
    expert_of_row = torch.searchsorted(
        counts_L.cumsum(0), torch.arange(num_rows, device=counts_L.device), right=True
    )
    return torch.nn.functional.embedding(expert_of_row, bias_LX)
