"""What metrics of routing records share: sums per MoE layer, for layers that may differ in their experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_moe.ops.records import Routing


class LayerSums(Metric):
    """Metric over the records of one MoE layer, or of several.

    Sums are exact in any order and over any split into batches and ranks; what they mean is worked out at the end.
    `forward` gives the value of its own batch, `compute` that of everything since `reset`, over all ranks. Values
    come as a dictionary of tensors with one entry per layer, without dimensions where there is a single layer.

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        options: torchmetrics' own, such as `process_group`.
    """

    full_state_update = False

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

    def _add_sum(self, name: str, size: int, dtype: torch.dtype) -> None:
        self.add_state(name, default=torch.zeros(size, dtype=dtype), dist_reduce_fx="sum")

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

    def _by_layer(self, flat: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = flat.split(self.num_experts)
        return parts
