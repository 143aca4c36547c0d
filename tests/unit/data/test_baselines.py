"""Bits per byte of counting, by hand on a few tokens."""

import math

import numpy as np
import pytest

from lightning_moe.data import TokenStream, bigram_bits_per_byte, unigram_bits_per_byte

TRAIN = np.array([65, 66, 65, 65, 256, 66], dtype=np.uint16)
# Predicted: 65 after 66, then 256 after 65.
VAL = np.array([66, 65, 256], dtype=np.uint16)


def test_unigram_by_hand() -> None:
    # Of 6 tokens 65 comes 3 times and 256 once; 257 symbols get one more each.
    nats = -math.log(4 / 263) - math.log(2 / 263)
    expected = nats / math.log(2) / 1  # one predicted byte: the end of a document has none
    assert unigram_bits_per_byte(TRAIN, VAL) == pytest.approx(expected, rel=1e-12)


def test_bigram_by_hand() -> None:
    # 66 is followed once, by 65; 65 is followed three times, once by 256.
    nats = -math.log(2 / 258) - math.log(2 / 260)
    assert bigram_bits_per_byte(TRAIN, VAL) == pytest.approx(nats / math.log(2), rel=1e-12)


def test_an_untrained_count_knows_log2_of_257() -> None:
    empty = np.array([65], dtype=np.uint16)
    val = np.array([65, 66, 67], dtype=np.uint16)
    assert bigram_bits_per_byte(empty, val) == pytest.approx(math.log2(257), rel=1e-12)


def test_a_stream_in_parts_counts_pairs_across_their_border() -> None:
    parts = TokenStream([TRAIN[:2], TRAIN[2:]])
    assert bigram_bits_per_byte(parts, VAL) == bigram_bits_per_byte(TRAIN, VAL)


def test_tokens_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token ids 1 to 300 are no byte tokens \(0 to 256\)"):
        unigram_bits_per_byte(np.array([1, 300]), VAL)


def test_a_validation_split_without_a_predicted_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="val predicts no byte"):
        unigram_bits_per_byte(TRAIN, np.array([65, 256], dtype=np.uint16))
