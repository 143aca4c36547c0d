"""How token copies reach their experts: the protocol, and the version for one rank."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_moe.ops.permute import Plan, combine, permute, plan_by_expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows at their experts.

    Attributes:
        rows_RW: rows of the first local expert, then of the second, and so on.
        counts_L: rows of each local expert (int64).
        kept_TK: which of this rank's token copies are computed; None when all are.
    """

    rows_RW: Float[Tensor, "R W"]
    counts_L: Int[Tensor, " L"]
    kept_TK: Bool[Tensor, "T K"] | None = None


@runtime_checkable
class Dispatcher(Protocol):
    """Sends token copies to the experts and brings the results back."""

    def for_mode(self, *, training: bool) -> "Dispatcher":
        """The dispatcher to use: one that may drop tokens gives way to one that doesn't outside of training."""
        ...

    def dispatch(
        self,
        x_TW: Float[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> Any:  # noqa: ANN401 - only `receive` of the same dispatcher reads it
        """Set the token copies going; other work may be done before `receive`.

        `weights_TK` may decide which copies are dropped; they are applied in `combine`.
        """
        ...

    def receive(self, flight: Any) -> Dispatched:  # noqa: ANN401
        """One row per token copy, grouped by expert, on the rank where the expert lives."""
        ...

    def combine(
        self,
        rows_RW: Float[Tensor, "R W"],
        weights_TK: Float[Tensor, "T K"],
        sent: Any,  # noqa: ANN401
    ) -> Float[Tensor, "T W"]:
        """Weighted sum of each token's expert outputs, back on the token's own rank."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sorted(Dispatched):
    """Rows that never left.

    Attributes:
        plan: how the copies were sorted, for the way back.
    """

    plan: Plan


class LocalDispatcher:
    """All experts are on this rank: sorting is all that happens."""

    def for_mode(self, *, training: bool) -> "LocalDispatcher":
        """The same in training and evaluation."""
        return self

    def dispatch(
        self,
        x_TW: Float[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> Sorted:
        """See `Dispatcher.dispatch`."""
        plan = plan_by_expert(ids_TK, num_experts)
        return Sorted(rows_RW=permute(x_TW, plan), counts_L=plan.counts_E, plan=plan)

    def receive(self, flight: Sorted) -> Sorted:
        """See `Dispatcher.receive`."""
        return flight

    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], sent: Sorted
    ) -> Float[Tensor, "T W"]:
        """See `Dispatcher.combine`."""
        return combine(rows_RW, weights_TK, sent.plan)
