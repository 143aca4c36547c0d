"""Sums of routing records over several optimizer steps on one rank, packed into one message for all ranks."""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.metrics.layer_sums import add_records, inner_product, layer_sizes
from lightning_moe.metrics.routing_history import LayerRouting, RoutingHistory
from lightning_moe.ops.load import rank_loads
from lightning_moe.ops.records import Routing

_SUMS: Final = ("kept", "score_sums", "lost_tokens", "confidence")


class RoutingSums:
    """Adds up the routing records of micro-batches; `end_step` keeps or drops those of a step.

    Everything is one flat float64 tensor: a few operations per micro-batch and step, however many layers there are.

    Args:
        num_experts: of each layer.
        expert_ranks: ranks that share out the experts of this rank's tokens, in the order of the experts.
        world: number of ranks.
        device: of the sums.
    """

    def __init__(
        self,
        num_experts: Sequence[int],
        expert_ranks: Sequence[int],
        world: int,
        device: torch.device,
    ) -> None:
        self.num_experts = list(num_experts)
        self.expert_ranks = list(expert_ranks)
        self.world = world
        self.drops = False
        self._device = device
        # Made once: an index of numbers would be copied from the host each time.
        self._expert_ranks = torch.tensor(self.expert_ranks, device=device)
        self._sizes = [sum(layer_sizes(name, self.num_experts)) for name in _SUMS]
        self._sums, self._step = self._zeros(), self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._device)

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(_SUMS, flat.split(self._sizes), strict=True))

    def observe(self, records: Sequence[Routing]) -> None:
        """Add one micro-batch."""
        self.drops |= any(record.lost_tokens is not None for record in records)
        add_records(self._parts(self._step), records)

    def end_step(self, *, keep: bool) -> None:
        """Add the step to the sums, or drop it where it was computed before."""
        if keep:
            self._sums += self._step
        self._step.zero_()

    def pack(self) -> Float[Tensor, " _"]:
        """All sums in one float64 vector, to be summed over ranks; sets them to zero."""
        loads = torch.zeros(
            len(self.num_experts), self.world, dtype=torch.float64, device=self._device
        )
        kept_of_layers = self._parts(self._sums)["kept"].split(self.num_experts)
        for layer, kept in enumerate(kept_of_layers):
            of_ranks = rank_loads(kept.long(), len(self.expert_ranks)).double()
            loads[layer].index_copy_(0, self._expert_ranks, of_ranks)
        packed = torch.cat([self._sums, loads.flatten()])
        self._sums = self._zeros()
        return packed

    def unpack(
        self, packed: Float[Tensor, " _"], requested: Sequence[Int[Tensor, " _"]]
    ) -> tuple[LayerRouting, ...]:
        """One entry of each layer.

        Args:
            packed: the sum over ranks of `pack`.
            requested: of each layer, the copies asked of its experts over the same steps, summed over ranks.
        """
        num_layers = len(self.num_experts)
        packed = packed.cpu()
        flat, loads = packed[: -num_layers * self.world], packed[-num_layers * self.world :]
        columns = [
            part.split(layer_sizes(name, self.num_experts))
            for name, part in self._parts(flat).items()
        ]
        return tuple(
            _entry(*values)
            for values in zip(requested, *columns, loads.view(num_layers, -1), strict=True)
        )


def history_entry(step: int, num_steps: int, layers: tuple[LayerRouting, ...]) -> RoutingHistory:
    """A history of one entry that ends with `step` and adds up `num_steps`."""
    return RoutingHistory(
        steps_S=torch.tensor([step]).numpy(),
        num_steps_S=torch.tensor([num_steps]).numpy(),
        layers=layers,
    )


def _entry(
    requested_E: Tensor,
    kept_E: Tensor,
    score_sums_E: Tensor,
    lost_tokens: Tensor,
    confidence: Tensor,
    rank_load: Tensor,
) -> LayerRouting:
    requested_E = requested_E.cpu()
    inner = inner_product(requested_E, score_sums_E)[None].numpy()
    margin, num_margins, entropy, num_tokens = confidence.split(1)
    return LayerRouting(
        requested_SE=requested_E[None].numpy(),
        kept_SE=kept_E.long()[None].numpy(),
        rank_load_SR=rank_load.long()[None].numpy(),
        lost_tokens_S=lost_tokens.long().numpy(),
        balance_S=1 + inner,
        inner_S=inner,
        margin_S=(margin / num_margins).numpy(),
        entropy_S=(entropy / num_tokens).numpy(),
    )
