"""What routing records of several steps add up to on one rank, packed into one message for all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_moe.ops.load import rank_loads
from lightning_moe.ops.records import Routing
from lightning_moe.ops.routing import confidence_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotals:
    """One layer over some steps, summed over all ranks, in host memory (float64 where not said otherwise).

    Attributes:
        kept_E: token copies computed by each expert (int64).
        score_sums_E: see `ops.Routing`.
        rank_load: copies computed by each rank (int64).
        lost_tokens: tokens that lost all copies (int64).
        margin, entropy: means per token; NaN where no router traced.
    """

    kept_E: Int[Tensor, " E"]
    score_sums_E: Float[Tensor, " E"]
    rank_load: Int[Tensor, " _"]
    lost_tokens: Int[Tensor, ""]
    margin: Float[Tensor, ""]
    entropy: Float[Tensor, ""]


class RoutingSums:
    """Adds up records as they come; a step counts once `end_step` says so.

    Everything is one flat tensor: a few operations per micro-batch and step, however many layers there are.

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
        num_layers, all_experts = len(self.num_experts), sum(self.num_experts)
        self._sizes = {"kept": all_experts, "scores": all_experts, "lost": num_layers}
        self._sizes["confidence"] = 4 * num_layers
        self._sums, self._step = self._zeros(), self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._sizes.values()), dtype=torch.float64, device=self._device)

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._sizes, flat.split(list(self._sizes.values())), strict=True))

    def observe(self, records: Sequence[Routing]) -> None:
        """Add one micro-batch."""
        step = self._parts(self._step)
        step["kept"] += torch.cat([record.kept_E for record in records])
        step["scores"] += torch.cat([record.score_sums_E.detach() for record in records])
        # Some layers may have a dispatcher that drops, or a router that traces, and others none.
        lost = [record.lost_tokens for record in records]
        if any(number is not None for number in lost):
            self.drops = True
            none = torch.zeros_like(step["lost"][0])
            step["lost"] += torch.stack([none if number is None else number for number in lost])
        tokens = [record.tokens for record in records]
        if any(routes is not None for routes in tokens):
            none = torch.zeros_like(step["confidence"][:4])
            step["confidence"] += torch.cat(
                [none if routes is None else confidence_sums(routes) for routes in tokens]
            )

    def end_step(self, *, keep: bool) -> None:
        """Add the step to the sums, or forget it where it was computed before."""
        if keep:
            self._sums += self._step
        self._step.zero_()

    def pack(self) -> Float[Tensor, " _"]:
        """Everything in one float64 vector, to be summed over ranks; starts anew."""
        loads = torch.zeros(
            len(self.num_experts), self.world, dtype=torch.float64, device=self._device
        )
        kept_of_layers = self._parts(self._sums)["kept"].split(self.num_experts)
        for layer, kept in enumerate(kept_of_layers):
            loads[layer, self.expert_ranks] = rank_loads(
                kept.long(), len(self.expert_ranks)
            ).double()
        packed = torch.cat([self._sums, loads.flatten()])
        self._sums = self._zeros()
        return packed

    def unpack(self, packed: Float[Tensor, " _"]) -> list[LayerTotals]:
        """What a sum over ranks of `pack` says of each layer."""
        num_layers = len(self.num_experts)
        sizes = [*self._sizes.values(), num_layers * self.world]
        kept, scores, lost, confidence, loads = packed.cpu().split(sizes)
        rows: Iterable[tuple[Tensor, ...]] = zip(
            kept.long().split(self.num_experts),
            scores.split(self.num_experts),
            lost.long(),
            confidence.view(num_layers, 4),
            loads.long().view(num_layers, -1),
            strict=True,
        )
        return [
            LayerTotals(
                kept_E=kept_E,
                score_sums_E=score_sums_E,
                rank_load=rank_load,
                lost_tokens=lost_tokens,
                margin=sure[0] / sure[1],
                entropy=sure[2] / sure[3],
            )
            for kept_E, score_sums_E, lost_tokens, sure, rank_load in rows
        ]
