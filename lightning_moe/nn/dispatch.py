"""How token copies reach their experts: the protocol, and the version for one rank.

Versions for several ranks are transports: one file each in `parallel/transports/`, registered in its `TRANSPORTS`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int, Num, UInt8
from torch import Tensor

from lightning_moe.ops.permute import Plan, combine, permute, plan_by_expert, sum_of_copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows at their experts.

    Attributes:
        rows_RW: rows of the first local expert, then of the second, and so on.
        counts_L: rows of each local expert (int64).
        back: what `combine` of the same dispatcher needs to return outputs; a pytree of tensors and constants.
        kept_TK: which of this rank's token copies are computed; None when all are.
        bytes_RZ: the rows as bytes, where they travelled so; `rows_RW` then has no values, only a gradient.
    """

    rows_RW: Num[Tensor, "R W"]
    counts_L: Int[Tensor, " L"]
    back: Any
    kept_TK: Bool[Tensor, "T K"] | None = None
    bytes_RZ: UInt8[Tensor, "R Z"] | None = None


@runtime_checkable
class Dispatcher(Protocol):
    """Sends token copies to their experts, and the experts' outputs back to the tokens."""

    def for_mode(self, *, training: bool) -> "Dispatcher":
        """The dispatcher to use in this mode: outside of training, one that drops nothing."""
        ...

    def dispatch(
        self,
        x_TW: Num[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> Any:  # noqa: ANN401 - only `receive` of the same dispatcher reads it
        """Start to send the token copies; other work may be done before `receive`.

        `x_TW` is moved, never read: tokens, or bytes that stand for them, in which zeros stand for a row of zeros.
        `weights_TK` may decide which copies are dropped; they are applied in `combine`.
        """
        ...

    def receive(self, flight: Any) -> Dispatched:  # noqa: ANN401 - from `dispatch`
        """One row per token copy, grouped by expert, on the rank where the expert lives."""
        ...

    def combine(
        self,
        rows_RW: Float[Tensor, "R W"],
        weights_TK: Float[Tensor, "T K"],
        back: Any,  # noqa: ANN401 - from `receive`
    ) -> Float[Tensor, "T W"]:
        """Weighted sum of each token's expert outputs, back on the token's own rank."""
        ...

    def token_gradient(
        self,
        grad_RW: Float[Tensor, "R W"],
        back: Any,  # noqa: ANN401 - from `receive`
    ) -> Float[Tensor, "T W"]:
        """Gradient of the tokens from that of their rows: what backward of `dispatch` and `receive` does."""
        ...


class LocalDispatcher:
    """Sorts token copies by expert; all experts are on this rank."""

    def for_mode(self, *, training: bool) -> "LocalDispatcher":
        """The same in training and evaluation."""
        return self

    def dispatch(
        self,
        x_TW: Num[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        plan = plan_by_expert(ids_TK, num_experts)
        return Dispatched(rows_RW=permute(x_TW, plan), counts_L=plan.counts_E, back=plan)

    def receive(self, flight: Dispatched) -> Dispatched:
        """See `Dispatcher.receive`."""
        return flight

    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], back: Plan
    ) -> Float[Tensor, "T W"]:
        """See `Dispatcher.combine`."""
        return combine(rows_RW, weights_TK, back)

    def token_gradient(self, grad_RW: Float[Tensor, "R W"], back: Plan) -> Float[Tensor, "T W"]:
        """See `Dispatcher.token_gradient`."""
        return sum_of_copies(grad_RW, back)
