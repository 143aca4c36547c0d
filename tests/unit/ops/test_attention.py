"""Causal attention with windows and documents."""

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import sdpa_attention
from lightning_moe.ops.attention import attention_mask
from tests.kit import reference_model
from tests.kit.memory import LiveBytes

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5]])


def _allowed(length: int, window: int | None, documents: Tensor | None) -> Tensor:
    mask = attention_mask(length, window=window, document_ids_BS=documents, device=CPU)
    allowed = mask.allowed_BHSS
    return torch.ones(1, 1, length, length).tril().bool() if allowed is None else allowed


def test_window_counts_the_position_itself_by_hand() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert _allowed(4, 2, None)[0, 0].int().tolist() == expected


def test_documents_do_not_see_each_other_by_hand() -> None:
    documents = torch.tensor([[7, 7, 3, 7]])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]
    assert _allowed(4, None, documents)[0, 0].int().tolist() == expected


@pytest.mark.parametrize("window", [None, 4, 9])
def test_a_window_as_long_as_the_sequence_needs_no_mask(window: int | None) -> None:
    mask = attention_mask(4, window=window, document_ids_BS=None, device=CPU)
    assert mask.allowed_BHSS is None


def test_making_a_mask_holds_three_bytes_per_pair_of_positions_at_most() -> None:
    length, documents = 64, torch.zeros(2, 64, dtype=torch.int64)
    for document_ids in (None, documents):
        with LiveBytes() as bytes_held:
            attention_mask(length, window=5, document_ids_BS=document_ids, device=CPU)
        # One per pair and sequence is kept; positions take a few bytes each.
        num_masks = 2 if document_ids is None else 1 + len(documents)
        assert bytes_held.peak <= num_masks * length**2 + 32 * length


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
def test_attention_equals_the_reference(
    num_kv_heads: int, window: int | None, documents: Tensor | None, generator: torch.Generator
) -> None:
    q = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, num_kv_heads, 6, 3, generator=generator, dtype=torch.float64)
    mask = attention_mask(6, window=window, document_ids_BS=documents, device=CPU)
    mixed = sdpa_attention(q, k, v, mask)
    for sequence in range(2):
        expected = reference_model.attention(
            q[sequence],
            k[sequence],
            v[sequence],
            window=window,
            documents=None if documents is None else documents[sequence].tolist(),
        )
        torch.testing.assert_close(mixed[sequence], expected)
