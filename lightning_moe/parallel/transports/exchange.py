"""The exchange of rows between the ranks of a group, and what its backward multiplies their gradients by."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.ops.autograd import Context
from lightning_moe.parallel.collectives import AxisGroup, Work

if TYPE_CHECKING:

    class _Context(Context):
        exchange: "Exchange"

    class _ContextInGraph(Context):
        group: int
        backward_factor: float

else:
    _Context = _ContextInGraph = Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An all-to-all of rows in one direction; backward sends their gradients in the other one.

    The rule for gradients of experts: each rank averages its loss over its own tokens, and an expert sees the tokens
    of ep ranks. Gradients are divided by ep where they travel to experts, here and nowhere else, which saves a pass
    over the weights' gradients; the reducer divides those by ep_dp, the replicas of an expert. Together this is
    1/world, the mean over all ranks. Gradients that travel on to the tokens are multiplied by ep again.

    Attributes:
        group: the ep ranks.
        towards: where the rows of the forward travel to; their gradients come from there.
        send_splits, receive_splits: rows to and from each rank; None for equal shares.
    """

    group: AxisGroup
    towards: Literal["experts", "tokens"]
    send_splits: list[int] | None = None
    receive_splits: list[int] | None = None

    @property
    def backward_factor(self) -> float:
        """Factor on gradients: ep where they come from experts, 1/ep where they travel to experts."""
        ep = float(self.group.size)
        return ep if self.towards == "experts" else 1 / ep

    def reversed(self) -> "Exchange":
        """The exchange that returns to each rank what it sent."""
        return Exchange(
            group=self.group,
            towards="tokens" if self.towards == "experts" else "experts",
            send_splits=self.receive_splits,
            receive_splits=self.send_splits,
        )

    def start(self, rows: Tensor) -> tuple[Tensor, Work | None]:
        """The received rows, which may be read once the work is done; with gradient."""
        if torch.compiler.is_compiling():
            return exchange_in_graph(rows, self.group.number, self.backward_factor), None
        started: list[Work | None] = []
        received: Tensor = _AllToAll.apply(rows, self, started)
        return received, started[0]

    def bring_back(self, rows: Tensor) -> Tensor:
        """Rows, each on the rank that sent the row in its place; with gradient."""
        returned, work = self.reversed().start(rows)
        if work is not None:
            work.wait()
        return returned

    def backward(self, grad: Tensor) -> Tensor:
        """Gradient of the rows that were sent, from that of the rows that were received."""
        returned, _ = self.reversed().run(grad)
        return returned.mul_(self.backward_factor)

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
        return ctx.exchange.backward(grad), None, None


# In compiled code the exchange of equal shares is one operator, of which the compiler knows the shapes only.
@torch.library.custom_op("lightning_moe::exchange", mutates_args=())
def exchange_in_graph(rows: Tensor, group: int, backward_factor: float) -> Tensor:
    """Equal shares of `rows` to all ranks of the group with that number (`AxisGroup.number`); see `Exchange`."""
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    AxisGroup.numbered(group).all_to_all(received, rows.contiguous())
    return received


@exchange_in_graph.register_fake
def _(rows: Tensor, group: int, backward_factor: float) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _keep_arguments(
    ctx: _ContextInGraph, inputs: tuple[Tensor, int, float], output: Tensor
) -> None:
    _, ctx.group, ctx.backward_factor = inputs


def _exchange_gradient(ctx: _ContextInGraph, grad: Tensor) -> tuple[Tensor, None, None]:
    """As `Exchange.backward`, which a graph can't hold."""
    factor = ctx.backward_factor
    return exchange_in_graph(grad, ctx.group, 1 / factor) * factor, None, None


exchange_in_graph.register_autograd(_exchange_gradient, setup_context=_keep_arguments)
