"""The batch that loaders hand to the module, and how rows become one."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.export import register_dataclass

from lightning_moe.ops.cross_entropy import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "TokenBatch", "TokenRow", "collate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One sample: a row of a batch, with the meaning of `TokenBatch`."""

    ids_S: Int[Tensor, " S"]
    labels_S: Int[Tensor, " S"]
    document_ids_S: Int[Tensor, " S"] | None


# Write-once rather than `frozen=True`: with bf16-true and 64-true Lightning copies a batch and sets
# every field of the copy (to the same integer tensors), which a frozen dataclass answers with an
# error. Frozen can come back when `apply_to_collection` in `convert_input` allows it.
@dataclass(eq=False, kw_only=True)
class TokenBatch:
    """Token ids and what to predict at each of them; fields can't be changed.

    Attributes:
        ids_BS: inputs (int64).
        labels_BS: the token after each input (int64), so already shifted; `IGNORE_INDEX` where
            there is nothing to predict.
        document_ids_BS: number of the document that each input belongs to (int64), from 0 in every
            row; None lets attention see the whole row.
    """

    ids_BS: Int[Tensor, "B S"]
    labels_BS: Int[Tensor, "B S"]
    document_ids_BS: Int[Tensor, "B S"] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field once; setting it again to the very same object does nothing."""
        if vars(self).get(name, value) is not value:
            raise FrozenInstanceError(f"cannot assign to field {name!r} of a TokenBatch")
        super().__setattr__(name, value)

    def to(
        self, device: torch.device | str | int, *, non_blocking: bool | None = None
    ) -> "TokenBatch":
        """The same batch on `device`.

        Args:
            device: where to.
            non_blocking: whether the copy may run on while Python goes on; None allows it towards
                CUDA, where the stream orders it before its use.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type == "cuda"
        documents_BS = self.document_ids_BS
        return TokenBatch(
            ids_BS=self.ids_BS.to(device, non_blocking=non_blocking),
            labels_BS=self.labels_BS.to(device, non_blocking=non_blocking),
            document_ids_BS=None
            if documents_BS is None
            else documents_BS.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "TokenBatch":
        """The same batch in page-locked memory; a DataLoader with `pin_memory` calls this."""
        documents_BS = self.document_ids_BS
        return TokenBatch(
            ids_BS=self.ids_BS.pin_memory(),
            labels_BS=self.labels_BS.pin_memory(),
            document_ids_BS=None if documents_BS is None else documents_BS.pin_memory(),
        )


register_dataclass(TokenBatch)


def collate(rows: Sequence[TokenRow]) -> TokenBatch:
    """Stack rows into a batch; either all of them have document ids or none."""
    documents = [row.document_ids_S for row in rows if row.document_ids_S is not None]
    return TokenBatch(
        ids_BS=torch.stack([row.ids_S for row in rows]),
        labels_BS=torch.stack([row.labels_S for row in rows]),
        document_ids_BS=torch.stack(documents) if documents else None,
    )
