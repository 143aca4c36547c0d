"""Packing: a stream of tokens cut into rows of equal length, without padding between documents."""

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_moe.data.batch import IGNORE_INDEX, TokenRow
from lightning_moe.data.tokens import TokenStream

Ids = npt.NDArray[np.int64]


def count_windows(num_tokens: int, sequence_length: int, *, keep_partial: bool) -> int:
    """Rows of a stream; every row predicts up to `sequence_length` tokens that no other row does.

    The first token of the stream has nothing before it, so `num_tokens - 1` can be predicted.

    Args:
        num_tokens: tokens of the stream.
        sequence_length: tokens of a row.
        keep_partial: whether a last row that is not full counts.
    """
    num_targets = max(num_tokens - 1, 0)
    extra = sequence_length - 1 if keep_partial else 0
    return (num_targets + extra) // sequence_length


def window_bounds(index: int, sequence_length: int) -> tuple[int, int]:
    """Where row `index` starts and stops in the stream; neighbours share one token.

    The last token of a row is its last label, and the first input of the next row.
    """
    start = index * sequence_length
    return start, start + sequence_length + 1


def document_ids(ids: Ids, eos_id: int) -> Ids:
    """For each token of a row the number of its document, from 0; EOS belongs to what it ends."""
    is_eos = ids == eos_id
    numbers: Ids = np.cumsum(is_eos) - is_eos
    return numbers


def make_row(window: Ids, sequence_length: int, *, eos_id: int, mask_documents: bool) -> TokenRow:
    """Inputs, labels and document ids of one window.

    Args:
        window: up to `sequence_length + 1` consecutive tokens; with fewer, the row is filled up
            with EOS and has labels only where a next token is known.
        sequence_length: tokens of the row.
        eos_id: the token that ends a document.
        mask_documents: whether the row has document ids.
    """
    ids = np.full(sequence_length, eos_id, dtype=np.int64)
    labels = np.full(sequence_length, IGNORE_INDEX, dtype=np.int64)
    inputs = window[:sequence_length]
    targets = window[1:]
    ids[: len(inputs)] = inputs
    labels[: len(targets)] = targets
    documents = torch.from_numpy(document_ids(ids, eos_id)) if mask_documents else None
    return TokenRow(
        ids_S=torch.from_numpy(ids), labels_S=torch.from_numpy(labels), document_ids_S=documents
    )


class WindowDataset(Dataset[TokenRow]):
    """Rows of a stream: row `i` reads tokens `i * S` to `(i + 1) * S` and predicts the next ones.

    Args:
        stream: tokens, with EOS after every document.
        sequence_length: tokens of a row (S).
        eos_id: the token that ends a document.
        mask_documents: whether rows have document ids.
        keep_partial: whether a last row that is not full is kept, filled up with tokens that
            predict nothing (validation), or dropped (training).
        num_rows: number of rows; None is what the stream gives. Rows past those are blank: they
            predict nothing. Ranks with fewer rows than others get them.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        *,
        eos_id: int,
        mask_documents: bool = False,
        keep_partial: bool = False,
        num_rows: int | None = None,
    ) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.eos_id = eos_id
        self.mask_documents = mask_documents
        num_windows = count_windows(len(stream), sequence_length, keep_partial=keep_partial)
        self.num_rows = num_windows if num_rows is None else num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> TokenRow:
        """Row `index`.

        Raises:
            IndexError: if there is no such row.
        """
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return make_row(
            self.stream.read(*window_bounds(index, self.sequence_length)),
            self.sequence_length,
            eos_id=self.eos_id,
            mask_documents=self.mask_documents,
        )

    def padded_to_multiple_of(self, divisor: int) -> "WindowDataset":
        """The same rows and as many blank ones as make their number a multiple of `divisor`."""
        return WindowDataset(
            self.stream,
            self.sequence_length,
            eos_id=self.eos_id,
            mask_documents=self.mask_documents,
            num_rows=-(-self.num_rows // divisor) * divisor,
        )
