"""Dropless dispatch between ranks: counts, then rows, to the ranks where their experts live."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_moe.config import MoEConfig
from lightning_moe.config.checks import AT_LEAST_ONE, check_ints, given
from lightning_moe.nn.dispatch import Dispatched, Dispatcher, LocalDispatcher
from lightning_moe.ops.compiled import outside_of_graphs
from lightning_moe.ops.permute import (
    Plan,
    combine,
    permute,
    plan_by_expert,
    reorder,
    sum_of_copies,
)
from lightning_moe.parallel.collectives import AxisGroup, Work
from lightning_moe.parallel.transports.exchange import Exchange
from lightning_moe.parallel.transports.transport import LargerBatches, Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllDispatch(Transport):
    """Counts travel, then rows; nothing is dropped.

    Attributes:
        receive_limit: rows that one rank may receive per layer and micro-batch; more is an error on all ranks. None: no
            limit; a rank may receive up to ranks * tokens * top_k rows.
    """

    receive_limit: int | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        check_ints("strategy", AT_LEAST_ONE, **given(receive_limit=self.receive_limit))

    def check_ranks(self, ep: int, *, requested: int | str) -> None:
        """Check that rows travel at all if there is a limit on them.

        Raises:
            ValueError: if the limit has no effect.
        """
        if ep == 1 and self.receive_limit is not None:
            here = ", which is 1 here" if requested == "auto" else ""
            raise ValueError(
                f"strategy.receive_limit={self.receive_limit} has no effect with strategy.expert_parallel="
                f"{requested}{here}: each rank has all experts, and no row travels; unset it"
            )

    def build(
        self, group: AxisGroup, layer: MoEConfig, larger: LargerBatches | None = None
    ) -> Dispatcher:
        """See `Transport.build`; a single rank needs no transport."""
        return LocalDispatcher() if group.size == 1 else AllToAllDispatcher(group, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangePlan:
    """How token copies reached the ranks of their experts; `combine` needs it to return their outputs.

    Attributes:
        plan: how the copies were sorted.
        to_experts: the exchange that they took.
        regroup: order that turns (source rank, expert) into (expert, source rank); None with one local expert.
    """

    plan: Plan
    to_experts: Exchange
    regroup: Plan | None


pytree.register_dataclass(ExchangePlan)  # nodes of autograd keep its tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """What `dispatch` leaves for `receive`; rows may not be read before the work is done."""

    rows_RW: Num[Tensor, "R W"]
    work: Work | None
    plan: Plan
    to_experts: Exchange
    counts_GL: Int[Tensor, "G L"]


class AllToAllDispatcher:
    """Sends every token copy to its expert's rank, and its output back. Drops nothing; one host sync per layer.

    A rank holds at most its received rows: with `receive_limit=None` up to (ranks * tokens * K) rows of the
    experts' width, when one rank gets everything. Forward and backward of SwiGLU experts of width W and hidden size F
    then hold at most max(3W + 3F, W + 5F) numbers per received row, and 3W per token copy that this rank sends and per
    token of its own, beside weights and their gradients. With gloo, for moments more: its threads let go of the rows
    of an exchange when they next run, which can be later than the exchange is done.

    Args:
        group: the expert-parallel ranks; expert e of E lives at index e // (E / size).
        options: see `AllToAllDispatch`.
    """

    def __init__(self, group: AxisGroup, options: AllToAllDispatch | None = None) -> None:
        self.group = group
        self.options = AllToAllDispatch() if options is None else options

    def for_mode(self, *, training: bool) -> "AllToAllDispatcher":
        """The same in training and evaluation."""
        return self

    # All of these stay out of graphs: how many rows there are is known on the host only while they run.
    @outside_of_graphs
    def dispatch(
        self,
        x_TW: Num[Tensor, "T W"],
        ids_TK: Int[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
        num_experts: int,
    ) -> InFlight:
        """Sort, exchange counts, and start to send the rows."""
        plan = plan_by_expert(ids_TK, num_experts)
        size, rank = self.group.size, self.group.index
        counts_all = plan.counts_E.new_empty(size, num_experts)
        # The counts of all ranks, not only those for this one: all ranks find the same limit exceeded.
        self.group.all_gather(counts_all, plan.counts_E.unsqueeze(0))
        sent = counts_all.unflatten(1, (size, -1))  # (source, destination, local expert)
        between: list[list[int]] = sent.sum(dim=-1).tolist()
        self._check_limit([sum(row[destination] for row in between) for destination in range(size)])
        to_experts = Exchange(
            group=self.group,
            towards="experts",
            send_splits=between[rank],
            receive_splits=[row[rank] for row in between],
        )
        rows_RW, work = to_experts.start(permute(x_TW, plan))
        return InFlight(
            rows_RW=rows_RW,
            work=work,
            plan=plan,
            to_experts=to_experts,
            counts_GL=sent[:, rank].contiguous(),
        )

    @outside_of_graphs
    def receive(self, flight: InFlight) -> Dispatched:
        """Wait for the rows and sort them by expert; within one expert by source rank, then by token."""
        if flight.work is not None:
            flight.work.wait()
        rows_RW, regroup = flight.rows_RW, None
        num_local = flight.counts_GL.shape[1]
        if num_local > 1:
            regroup = plan_by_expert(_expert_of_row(flight.counts_GL, len(rows_RW)), num_local)
            rows_RW = reorder(rows_RW, regroup.order_N, regroup.inverse_TK.flatten())
        return Dispatched(
            rows_RW=rows_RW,
            counts_L=flight.counts_GL.sum(dim=0),
            back=ExchangePlan(plan=flight.plan, to_experts=flight.to_experts, regroup=regroup),
        )

    @outside_of_graphs
    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], back: ExchangePlan
    ) -> Float[Tensor, "T W"]:
        """Send the outputs back, then add them up with their weights."""
        rows_RW = _as_received(rows_RW, back.regroup)
        return combine(back.to_experts.bring_back(rows_RW), weights_TK, back.plan)

    @outside_of_graphs
    def token_gradient(
        self, grad_RW: Float[Tensor, "R W"], back: ExchangePlan
    ) -> Float[Tensor, "T W"]:
        """See `Dispatcher.token_gradient`."""
        grad_NW = back.to_experts.backward(_as_received(grad_RW, back.regroup))
        return sum_of_copies(grad_NW, back.plan)

    def _check_limit(self, received: list[int]) -> None:
        limit = self.options.receive_limit
        if limit is not None and max(received) > limit:
            index = received.index(max(received))
            raise RuntimeError(
                f"rank {self.group.ranks[index]} would receive {max(received)} rows in one MoE layer, more than "
                f"strategy.receive_limit={limit}; routing is too uneven (raise the balance loss or "
                "bias_gamma), the micro-batch too large, or the limit too low"
            )


def _as_received(rows_RW: Tensor, regroup: Plan | None) -> Tensor:
    """Rows in the order in which they came."""
    if regroup is None:
        return rows_RW
    return reorder(rows_RW, regroup.inverse_TK.flatten(), regroup.order_N)


def _expert_of_row(counts_GL: Tensor, num_rows: int) -> Tensor:
    """(R, 1) local expert of each received row, rows being ordered by (source, expert)."""
    num_sources, num_local = counts_GL.shape
    ids = torch.arange(num_local, device=counts_GL.device).repeat(num_sources)
    return ids.repeat_interleave(counts_GL.flatten(), output_size=num_rows).unsqueeze(-1)
