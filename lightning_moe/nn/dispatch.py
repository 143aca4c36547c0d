"""How token copies reach their experts: the protocol, and the version for one rank."""

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.ops.permute import Plan, combine, permute, plan_by_expert


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows at their experts.

    Attributes:
        rows_RW: rows of the first local expert, then of the second, and so on.
        counts_L: rows of each local expert (int64).
        plan: how the copies were sorted, for the way back.
        kept_E: this rank's copies that are computed, per expert; None when all are.
    """

    rows_RW: Float[Tensor, "R W"]
    counts_L: Int[Tensor, " L"]
    plan: Plan
    kept_E: Int[Tensor, " E"] | None = None


class Dispatcher(Protocol):
    """Sends token copies to the experts and brings the results back."""

    def for_mode(self, *, training: bool) -> "Dispatcher":
        """The dispatcher to use: one that may drop tokens gives way to one that doesn't outside of training."""
        ...

    def dispatch(
        self, x_TW: Float[Tensor, "T W"], ids_TK: Int[Tensor, "T K"], num_experts: int
    ) -> Any:  # noqa: ANN401 - only `receive` of the same dispatcher reads it
        """Set the token copies going; other work may be done before `receive`."""
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


class LocalDispatcher:
    """All experts are on this rank: sorting is all that happens."""

    def for_mode(self, *, training: bool) -> "LocalDispatcher":
        """The same in training and evaluation."""
        return self

    def dispatch(
        self, x_TW: Float[Tensor, "T W"], ids_TK: Int[Tensor, "T K"], num_experts: int
    ) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        plan = plan_by_expert(ids_TK, num_experts)
        return Dispatched(rows_RW=permute(x_TW, plan), counts_L=plan.counts_E, plan=plan)

    def receive(self, flight: Dispatched) -> Dispatched:
        """See `Dispatcher.receive`."""
        return flight

    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], sent: Dispatched
    ) -> Float[Tensor, "T W"]:
        """See `Dispatcher.combine`."""
        return combine(rows_RW, weights_TK, sent.plan)
