"""Rows of a stream, by hand on a few tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe.data import IGNORE_INDEX, TokenStream, WindowDataset
from lightning_moe.data.packing import count_windows, document_ids, make_row

EOS = 9
# Documents: 1 2 | 3 | (empty) | 4 5 6 7
STREAM = [1, 2, EOS, 3, EOS, EOS, 4, 5, 6, 7, EOS]


def dataset(tokens: list[int], sequence_length: int, **options: bool) -> WindowDataset:
    array = np.array(tokens, dtype=np.uint16)
    # In three parts, so that rows cross their borders.
    stream = TokenStream([array[:2], array[2:7], array[7:]])
    return WindowDataset(stream, sequence_length, eos_id=EOS, **options)


def test_training_rows_by_hand() -> None:
    rows = dataset(STREAM, 4)
    assert len(rows) == 2
    assert [rows[i].ids_S.tolist() for i in range(2)] == [[1, 2, EOS, 3], [EOS, EOS, 4, 5]]
    assert [rows[i].labels_S.tolist() for i in range(2)] == [[2, EOS, 3, EOS], [EOS, 4, 5, 6]]
    assert rows[0].document_ids_S is None


def test_validation_keeps_the_last_row_and_predicts_nothing_past_the_end() -> None:
    rows = dataset(STREAM, 4, keep_partial=True)
    assert len(rows) == 3
    assert rows[2].ids_S.tolist() == [6, 7, EOS, EOS]
    assert rows[2].labels_S.tolist() == [7, EOS, IGNORE_INDEX, IGNORE_INDEX]


def test_an_end_of_document_belongs_to_the_document_it_ends() -> None:
    assert document_ids(np.array(STREAM), EOS).tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3]


def test_documents_are_numbered_from_zero_in_every_row() -> None:
    rows = dataset(STREAM, 4, mask_documents=True)
    assert rows[0].document_ids_S.tolist() == [0, 0, 0, 1]
    assert rows[1].document_ids_S.tolist() == [0, 1, 2, 2]


def test_a_blank_row_has_documents_but_nothing_to_predict() -> None:
    row = make_row(np.array([], dtype=np.int64), 3, eos_id=EOS, mask_documents=True)
    assert row.ids_S.tolist() == [EOS] * 3
    assert row.labels_S.tolist() == [IGNORE_INDEX] * 3
    assert row.document_ids_S.tolist() == [0, 1, 2]


@given(num_tokens=st.integers(0, 40), sequence_length=st.integers(2, 7), divisor=st.integers(1, 4))
def test_validation_predicts_every_token_but_the_first_exactly_once(
    num_tokens: int, sequence_length: int, divisor: int
) -> None:
    tokens = [i % 5 for i in range(num_tokens)]
    rows = dataset(tokens, sequence_length, keep_partial=True).padded_to_multiple_of(divisor)
    assert len(rows) % divisor == 0
    labels = torch.cat([rows[i].labels_S for i in range(len(rows))] or [torch.empty(0)])
    assert labels[labels != IGNORE_INDEX].tolist() == tokens[1:]


@given(num_tokens=st.integers(0, 40), sequence_length=st.integers(2, 7))
def test_training_rows_are_full_and_drop_less_than_one_row(
    num_tokens: int, sequence_length: int
) -> None:
    tokens = [i % 5 for i in range(num_tokens)]
    rows = dataset(tokens, sequence_length)
    labels = torch.cat([rows[i].labels_S for i in range(len(rows))] or [torch.empty(0)])
    assert labels.tolist() == tokens[1 : 1 + len(labels)]
    assert 0 <= len(tokens[1:]) - len(labels) < sequence_length


@pytest.mark.parametrize(
    ("num_tokens", "full", "with_partial"), [(0, 0, 0), (1, 0, 0), (4, 0, 1), (5, 1, 1), (6, 1, 2)]
)
def test_a_row_of_four_needs_five_tokens(num_tokens: int, full: int, with_partial: int) -> None:
    assert count_windows(num_tokens, 4, keep_partial=False) == full
    assert count_windows(num_tokens, 4, keep_partial=True) == with_partial


def test_a_row_past_the_end_is_an_index_error() -> None:
    rows = dataset(STREAM, 4)
    with pytest.raises(IndexError, match="row 2 of 2"):
        rows[2]
    with pytest.raises(IndexError, match="row -1 of 2"):
        rows[-1]
