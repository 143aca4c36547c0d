"""Dropless dispatch between ranks: counts, then rows, to the ranks where their experts live."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_moe.nn.dispatch import Dispatched
from lightning_moe.ops.autograd import Context
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

if TYPE_CHECKING:

    class _Context(Context):
        exchange: "Exchange"

    class _ContextInGraph(Context):
        group: int
        gradient_factor: float

else:
    _Context = _ContextInGraph = Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An all-to-all of rows, and what its backward multiplies their gradients by.

    The experts of a rank see the tokens of all ep ranks, each of which averages its loss over its own tokens. So
    gradients of rows are divided by ep on their way to the experts, whose weights then get the gradient of the mean
    over ranks, and multiplied by ep on from there to the tokens. Rows hold far fewer numbers than weights.

    Attributes:
        group: the ranks.
        gradient_factor: ep where rows travel to experts, 1/ep where they come back.
        send_splits, receive_splits: rows to and from each rank; None for equal shares.
    """

    group: AxisGroup
    gradient_factor: float
    send_splits: list[int] | None = None
    receive_splits: list[int] | None = None

    def back(self) -> "Exchange":
        """The same way in the other direction."""
        return Exchange(
            group=self.group,
            gradient_factor=1 / self.gradient_factor,
            send_splits=self.receive_splits,
            receive_splits=self.send_splits,
        )

    def start(self, rows: Tensor) -> tuple[Tensor, Work | None]:
        """The received rows, which may be read once the work is done. Backward goes the same way back."""
        if torch.compiler.is_compiling():
            return exchange_in_graph(rows, self.group.number, self.gradient_factor), None
        started: list[Work | None] = []
        received: Tensor = _AllToAll.apply(rows, self, started)
        return received, started[0]

    def bring_back(self, rows: Tensor) -> Tensor:
        """What each rank received, on the rank that it came from."""
        returned, work = self.back().start(rows)
        if work is not None:
            work.wait()
        return returned

    def run(self, rows: Tensor, *, async_op: bool = False) -> tuple[Tensor, Work | None]:
        """As `start`, without a gradient."""
        num_received = len(rows) if self.receive_splits is None else sum(self.receive_splits)
        received = rows.new_empty(num_received, *rows.shape[1:])
        work = self.group.all_to_all(
            received,
            rows.contiguous(),
            out_splits=self.receive_splits,
            in_splits=self.send_splits,
            async_op=async_op,
        )
        return received, work


class _AllToAll(torch.autograd.Function):
    """torch has no differentiable all-to-all that may run while other work goes on.

    A rank that sends or receives no row still takes part, forward and backward: empty tensors keep the graph.
    """

    @staticmethod
    def forward(
        ctx: _Context, rows: Tensor, exchange: Exchange, started: list[Work | None]
    ) -> Tensor:
        ctx.exchange = exchange
        received, work = exchange.run(rows, async_op=True)
        started.append(work)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        returned, _ = ctx.exchange.back().run(grad)
        return returned.mul_(ctx.exchange.gradient_factor), None, None


# In compiled code the exchange of equal shares is one operator, of which the compiler knows the shapes only.
@torch.library.custom_op("lightning_moe::exchange", mutates_args=())
def exchange_in_graph(rows: Tensor, group: int, gradient_factor: float) -> Tensor:
    """Equal shares of `rows` to all ranks of the group with that number (`AxisGroup.number`)."""
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    AxisGroup.numbered(group).all_to_all(received, rows.contiguous())
    return received


@exchange_in_graph.register_fake
def _(rows: Tensor, group: int, gradient_factor: float) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _keep_arguments(
    ctx: _ContextInGraph, inputs: tuple[Tensor, int, float], output: Tensor
) -> None:
    _, ctx.group, ctx.gradient_factor = inputs


def _exchange_gradient(ctx: _ContextInGraph, grad: Tensor) -> tuple[Tensor, None, None]:
    factor = ctx.gradient_factor
    return exchange_in_graph(grad, ctx.group, 1 / factor) * factor, None, None


exchange_in_graph.register_autograd(_exchange_gradient, setup_context=_keep_arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How copies reached the ranks of their experts, for the way back.

    Attributes:
        plan: how the copies were sorted.
        way: how the rows came.
        regroup: order that turns (source rank, expert) into (expert, source rank); None with one local expert.
    """

    plan: Plan
    way: Exchange
    regroup: Plan | None


pytree.register_dataclass(Route)  # nodes of autograd keep its tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """What `dispatch` leaves for `receive`; rows may not be read before the work is done."""

    rows_RW: Num[Tensor, "R W"]
    work: Work | None
    plan: Plan
    way: Exchange
    counts_GL: Int[Tensor, "G L"]


class AllToAllDispatcher:
    """Every token copy travels to its expert's rank and back. Nothing is dropped; one host sync per layer.

    A rank holds at most its received rows: with `receive_limit=None` up to (ranks * tokens * K) rows of the
    experts' width, when one rank gets everything. Forward and backward of SwiGLU experts of width W and hidden size F
    then hold at most max(3W + 3F, W + 5F) numbers per received row, and 3W per token copy that this rank sends and per
    token of its own, beside weights and their gradients.

    Args:
        group: the expert-parallel ranks; expert e of E lives at index e // (E / size).
        receive_limit: rows that a rank may receive per layer and micro-batch; more is an error on every rank.
    """

    def __init__(self, group: AxisGroup, *, receive_limit: int | None = None) -> None:
        self.group = group
        self.receive_limit = receive_limit

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
        """Sort, exchange counts, and set the rows going."""
        plan = plan_by_expert(ids_TK, num_experts)
        size, rank = self.group.size, self.group.index
        counts_all = plan.counts_E.new_empty(size, num_experts)
        # Everybody's counts rather than only those meant for this rank: all ranks see an overflow alike.
        self.group.all_gather(counts_all, plan.counts_E.unsqueeze(0))
        sent = counts_all.unflatten(1, (size, -1))  # (source, destination, local expert)
        between: list[list[int]] = sent.sum(dim=-1).tolist()
        self._check_limit([sum(row[destination] for row in between) for destination in range(size)])
        way = Exchange(
            group=self.group,
            gradient_factor=float(size),
            send_splits=between[rank],
            receive_splits=[row[rank] for row in between],
        )
        rows_RW, work = way.start(permute(x_TW, plan))
        return InFlight(
            rows_RW=rows_RW,
            work=work,
            plan=plan,
            way=way,
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
            back=Route(plan=flight.plan, way=flight.way, regroup=regroup),
        )

    @outside_of_graphs
    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], back: Route
    ) -> Float[Tensor, "T W"]:
        """The way back, then the weighted sum."""
        rows_RW = _as_received(rows_RW, back.regroup)
        return combine(back.way.bring_back(rows_RW), weights_TK, back.plan)

    @outside_of_graphs
    def token_gradient(self, grad_RW: Float[Tensor, "R W"], back: Route) -> Float[Tensor, "T W"]:
        """The way back, times the number of ranks (see `Exchange`), then the sum."""
        grad_RW = _as_received(grad_RW, back.regroup)
        grad_NW = back.way.bring_back(grad_RW).mul_(back.way.gradient_factor)
        return sum_of_copies(grad_NW, back.plan)

    def _check_limit(self, received: list[int]) -> None:
        if self.receive_limit is not None and max(received) > self.receive_limit:
            index = received.index(max(received))
            raise RuntimeError(
                f"rank {self.group.ranks[index]} would receive {max(received)} rows in one MoE layer, more than "
                f"strategy.receive_limit={self.receive_limit}; routing is too uneven (raise the balance loss or "
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
