"""Dropless dispatch between ranks: counts, then rows, to the ranks where their experts live."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.nn.dispatch import Dispatched
from lightning_moe.ops.autograd import Context
from lightning_moe.ops.permute import Plan, combine, permute, plan_by_expert, reorder
from lightning_moe.parallel.collectives import AxisGroup, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged(Dispatched):
    """Rows that came from all ranks of the group.

    Attributes:
        plan: how the copies were sorted, for the way back.
        send_splits, receive_splits: rows to and from each rank.
        regroup: order that turns (source rank, expert) into (expert, source rank); None with one local expert.
    """

    plan: Plan
    send_splits: list[int]
    receive_splits: list[int]
    regroup: Plan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """What `dispatch` leaves for `receive`; rows may not be read before the work is done."""

    rows_RW: Float[Tensor, "R W"]
    work: Work | None
    plan: Plan
    send_splits: list[int]
    receive_splits: list[int]
    counts_GL: Int[Tensor, "G L"]


class AllToAllDispatcher:
    """Every token copy travels to its expert's rank and back. Nothing is dropped; one host sync per layer.

    A rank holds at most its received rows: with `receive_limit=None` up to (ranks * tokens * K) rows of the
    experts' width, when one rank gets everything.

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

    def dispatch(
        self,
        x_TW: Float[Tensor, "T W"],
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
        send_splits, receive_splits = between[rank], [row[rank] for row in between]
        rows_RW, work = _exchange(permute(x_TW, plan), receive_splits, send_splits, self.group)
        return InFlight(
            rows_RW=rows_RW,
            work=work,
            plan=plan,
            send_splits=send_splits,
            receive_splits=receive_splits,
            counts_GL=sent[:, rank].contiguous(),
        )

    def receive(self, flight: InFlight) -> Exchanged:
        """Wait for the rows and sort them by expert; within one expert by source rank, then by token."""
        if flight.work is not None:
            flight.work.wait()
        rows_RW, regroup = flight.rows_RW, None
        num_local = flight.counts_GL.shape[1]
        if num_local > 1:
            regroup = plan_by_expert(_expert_of_row(flight.counts_GL, len(rows_RW)), num_local)
            rows_RW = reorder(rows_RW, regroup.order_N, regroup.inverse_TK.flatten())
        return Exchanged(
            rows_RW=rows_RW,
            counts_L=flight.counts_GL.sum(dim=0),
            plan=flight.plan,
            send_splits=flight.send_splits,
            receive_splits=flight.receive_splits,
            regroup=regroup,
        )

    def combine(
        self, rows_RW: Float[Tensor, "R W"], weights_TK: Float[Tensor, "T K"], sent: Exchanged
    ) -> Float[Tensor, "T W"]:
        """The way back, then the weighted sum."""
        if sent.regroup is not None:
            rows_RW = reorder(rows_RW, sent.regroup.inverse_TK.flatten(), sent.regroup.order_N)
        back_NW, work = _exchange(rows_RW, sent.send_splits, sent.receive_splits, self.group)
        if work is not None:
            work.wait()
        return combine(back_NW, weights_TK, sent.plan)

    def _check_limit(self, received: list[int]) -> None:
        if self.receive_limit is not None and max(received) > self.receive_limit:
            index = received.index(max(received))
            raise RuntimeError(
                f"rank {self.group.ranks[index]} would receive {max(received)} rows in one MoE layer, more than "
                f"strategy.receive_limit={self.receive_limit}; routing is too uneven (raise the balance loss or "
                "bias_gamma), the micro-batch too large, or the limit too low"
            )


def _expert_of_row(counts_GL: Tensor, num_rows: int) -> Tensor:
    """(R, 1) local expert of each received row, rows being ordered by (source, expert)."""
    num_sources, num_local = counts_GL.shape
    ids = torch.arange(num_local, device=counts_GL.device).repeat(num_sources)
    return ids.repeat_interleave(counts_GL.flatten(), output_size=num_rows).unsqueeze(-1)


def _exchange(
    rows: Tensor, receive_splits: list[int], send_splits: list[int], group: AxisGroup
) -> tuple[Tensor, Work | None]:
    """Rows set going to their ranks, and the work to wait for. Backward takes the same way back."""
    started: list[Work | None] = []
    received: Tensor = _AllToAll.apply(rows, receive_splits, send_splits, group, started)
    return received, started[0]


class _AllToAll(torch.autograd.Function):
    """torch has no differentiable all-to-all that may run while other work goes on.

    A rank that sends or receives no row still takes part, forward and backward: empty tensors keep the graph.
    """

    @staticmethod
    def forward(
        ctx: Context,
        rows: Tensor,
        receive_splits: list[int],
        send_splits: list[int],
        group: AxisGroup,
        started: list[Work | None],
    ) -> Tensor:
        ctx.splits = (send_splits, receive_splits)  # type: ignore[attr-defined]  # free-form, as torch has it
        ctx.group = group  # type: ignore[attr-defined]
        received = rows.new_empty(sum(receive_splits), *rows.shape[1:])
        started.append(
            group.all_to_all(
                received,
                rows.contiguous(),
                out_splits=receive_splits,
                in_splits=send_splits,
                async_op=True,
            )
        )
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        send_splits, receive_splits = ctx.splits  # type: ignore[attr-defined]
        back = grad.new_empty(sum(send_splits), *grad.shape[1:])
        group: AxisGroup = ctx.group  # type: ignore[attr-defined]
        group.all_to_all(back, grad.contiguous(), out_splits=send_splits, in_splits=receive_splits)
        return back, None, None, None, None
