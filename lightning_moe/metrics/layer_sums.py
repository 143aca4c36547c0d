"""Sums of routing records per MoE layer, for layers that may differ in their experts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric

from lightning_moe.ops.load import balance_inner_product
from lightning_moe.ops.records import Routing
from lightning_moe.ops.routing import confidence_sums

# What one record adds to each sum; None from a record that doesn't have it. Sums over experts have a value per expert.
_ADDENDS: Final[Mapping[str, Callable[[Routing], Tensor | None]]] = {
    "requested": lambda record: record.requested_E,
    "kept": lambda record: record.kept_E,
    "score_sums": lambda record: record.score_sums_E.detach(),
    "num_tokens": lambda record: record.num_tokens[None],
    "lost_tokens": lambda record: None if record.lost_tokens is None else record.lost_tokens[None],
    "confidence": lambda record: None if record.tokens is None else confidence_sums(record.tokens),
}
_VALUES_PER_LAYER: Final = {"num_tokens": 1, "lost_tokens": 1, "confidence": 4}
_FLOATS: Final = ("score_sums", "confidence")


def layer_sizes(name: str, num_experts: Sequence[int]) -> list[int]:
    """How many values each layer has in the flat sum `name`."""
    return [_VALUES_PER_LAYER.get(name, size) for size in num_experts]


def add_records(sums: Mapping[str, Tensor], records: Sequence[Routing]) -> None:
    """Add one micro-batch to flat sums by name, in place; layers without a value there add nothing.

    Args:
        sums: each with the values of all layers, one after the other.
        records: one per layer.
    """
    num_experts = [record.requested_E.numel() for record in records]
    for name, total in sums.items():
        addends = [_ADDENDS[name](record) for record in records]
        if all(addend is None for addend in addends):
            continue
        sizes = layer_sizes(name, num_experts)
        total.add_(
            torch.cat(
                [
                    total.new_zeros(size) if addend is None else addend
                    for addend, size in zip(addends, sizes, strict=True)
                ]
            )
        )


def inner_product(
    requested_E: Int[Tensor, " E"], score_sums_E: Float[Tensor, " E"]
) -> Float[Tensor, ""]:
    """Distance of the balance loss from 1, see `ops.load.balance_inner_product`; NaN where nothing was routed."""
    inner = balance_inner_product(requested_E, score_sums_E)
    return torch.where(requested_E.sum() > 0, inner, torch.nan)


class LayerSums(Metric):
    """Metric over the records of one MoE layer, or of several.

    Sums are exact in any order and over any split into batches and ranks; statistics are computed at the end.
    `forward` gives the value of its own batch, `compute` that of everything since `reset`, over all ranks. Values
    come as a dictionary of tensors with one entry per layer, without dimensions where there is a single layer.

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        options: torchmetrics' own, such as `process_group`.
    """

    full_state_update = False
    sums: ClassVar[tuple[str, ...]] = ()
    """The sums that a subclass takes of each record."""

    def __init__(
        self,
        num_experts: int | Sequence[int],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        sizes = num_experts if isinstance(num_experts, Sequence) else (num_experts,)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"{type(self).__name__}: num_experts={num_experts!r} must be a whole number of experts from 1 on, or a "
                "sequence of them with one per MoE layer"
            )
        self.num_experts = tuple(sizes)
        for name in self.sums:
            dtype = torch.float64 if name in _FLOATS else torch.int64
            zeros = torch.zeros(sum(layer_sizes(name, self.num_experts)), dtype=dtype)
            self.add_state(name, default=zeros, dist_reduce_fx="sum")

    def update(self, records: Routing | Sequence[Routing]) -> None:
        """Add the record of the layer, or one record per layer."""
        add_records({name: getattr(self, name) for name in self.sums}, self._checked(records))

    def _checked(self, records: Routing | Sequence[Routing]) -> list[Routing]:
        """One record per layer.

        Raises:
            ValueError: if they are not those of the layers that this metric was made for.
        """
        found = [records] if isinstance(records, Routing) else list(records)
        if not all(isinstance(record, Routing) for record in found):
            raise ValueError(
                f"{type(self).__name__} got a {type(records).__name__} that holds no routing records; pass what MoE "
                "layers return beside their output"
            )
        sizes = tuple(record.requested_E.numel() for record in found)
        if sizes != self.num_experts:
            raise ValueError(
                f"{type(self).__name__}(num_experts={list(self.num_experts)}) got records of layers with "
                f"{list(sizes)} experts; pass one record per MoE layer, in the same order each time"
            )
        return found

    def _by_layer(self, name: str) -> tuple[Tensor, ...]:
        flat: Tensor = getattr(self, name)
        parts: tuple[Tensor, ...] = flat.split(layer_sizes(name, self.num_experts))
        return parts
