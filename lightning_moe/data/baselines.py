"""What counting bytes achieves: bits per byte that a trained model must beat.

Scored as the model is: every validation token but the first is predicted, ends of documents
included; the sum of nats is divided by ln 2 and by the number of predicted bytes. Counts come from
the training tokens, with one added to every count (Laplace).
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_moe.data.tokens import BYTE_EOS_ID, NUM_BYTES, IdArray, TokenStream

_NUM_SYMBOLS: Final = NUM_BYTES + 1

Counts = npt.NDArray[np.int64]


def unigram_bits_per_byte(train: IdArray | TokenStream, val: IdArray | TokenStream) -> float:
    """Bits per byte of `p(next) = (count(next) + 1) / (tokens + 257)`.

    Raises:
        ValueError: if a token is neither a byte nor 256, or `val` predicts no byte.
    """
    counts = np.zeros(_NUM_SYMBOLS, dtype=np.int64)
    for chunk in _chunks(train):
        counts += np.bincount(chunk, minlength=_NUM_SYMBOLS)
    nats = -np.log((counts + 1) / (counts.sum() + _NUM_SYMBOLS))
    targets = _pair_counts(val).sum(axis=0)
    return _bits_per_byte(float((targets * nats).sum()), targets)


def bigram_bits_per_byte(train: IdArray | TokenStream, val: IdArray | TokenStream) -> float:
    """Bits per byte of `p(next | last) = (count(last, next) + 1) / (count(last, any) + 257)`.

    Raises:
        ValueError: if a token is neither a byte nor 256, or `val` predicts no byte.
    """
    counts = _pair_counts(train)
    nats = -np.log((counts + 1) / (counts.sum(axis=1, keepdims=True) + _NUM_SYMBOLS))
    pairs = _pair_counts(val)
    return _bits_per_byte(float((pairs * nats).sum()), pairs.sum(axis=0))


def _pair_counts(tokens: IdArray | TokenStream) -> Counts:
    """How often each symbol (column) follows each other one (row)."""
    counts = np.zeros(_NUM_SYMBOLS * _NUM_SYMBOLS, dtype=np.int64)
    last = np.empty(0, dtype=np.int64)
    for chunk in _chunks(tokens):
        joined = np.concatenate([last, chunk])
        codes = joined[:-1] * _NUM_SYMBOLS + joined[1:]
        counts += np.bincount(codes, minlength=len(counts))
        last = joined[-1:]
    return counts.reshape(_NUM_SYMBOLS, _NUM_SYMBOLS)


def _chunks(tokens: IdArray | TokenStream) -> Iterator[npt.NDArray[np.int64]]:
    stream = tokens if isinstance(tokens, TokenStream) else TokenStream([tokens])
    for chunk in stream.chunks():
        if chunk.min() < 0 or chunk.max() > BYTE_EOS_ID:
            raise ValueError(
                f"token ids {chunk.min()} to {chunk.max()} are no byte tokens (0 to {BYTE_EOS_ID})"
            )
        yield chunk


def _bits_per_byte(total_nats: float, targets: Counts) -> float:
    num_bytes = int(targets[:NUM_BYTES].sum())
    if num_bytes == 0:
        raise ValueError("val predicts no byte; give at least two tokens, the second one a byte")
    return total_nats / math.log(2) / num_bytes
