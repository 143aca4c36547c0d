"""Batches: fixed, movable, known to pytrees and to Lightning."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch.utils._pytree import tree_leaves, tree_map

from lightning_moe.data import TokenBatch, TokenRow, collate


def make_batch(*, documents: bool) -> TokenBatch:
    ids_BS = torch.arange(6).view(2, 3)
    return TokenBatch(
        ids_BS=ids_BS,
        labels_BS=ids_BS + 1,
        document_ids_BS=torch.zeros_like(ids_BS) if documents else None,
    )


def test_fields_cannot_be_changed() -> None:
    batch = make_batch(documents=False)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'ids_BS'"):
        batch.ids_BS = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'document_ids_BS'"):
        batch.document_ids_BS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(("documents", "num_leaves"), [(False, 2), (True, 3)])
def test_a_pytree_map_reaches_every_tensor(documents: bool, num_leaves: int) -> None:
    batch = make_batch(documents=documents)
    assert len(tree_leaves(batch)) == num_leaves
    doubled = tree_map(lambda tensor: tensor * 2, batch)
    assert isinstance(doubled, TokenBatch)
    assert torch.equal(doubled.labels_BS, batch.labels_BS * 2)


@pytest.mark.parametrize("documents", [False, True])
def test_lightning_moves_a_batch_as_a_whole(documents: bool) -> None:
    moved = move_data_to_device(make_batch(documents=documents), torch.device("meta"))
    assert isinstance(moved, TokenBatch)
    assert moved.ids_BS.is_meta
    assert moved.labels_BS.is_meta
    assert (moved.document_ids_BS is not None) == documents


@pytest.mark.parametrize("precision", [Precision(), HalfPrecision("bf16-true"), DoublePrecision()])
@pytest.mark.parametrize("documents", [False, True])
def test_every_precision_of_lightning_takes_a_batch(precision: Precision, documents: bool) -> None:
    batch = make_batch(documents=documents)
    converted = precision.convert_input(batch)
    assert torch.equal(converted.ids_BS, batch.ids_BS)
    assert converted.ids_BS.dtype == torch.int64


def test_collate_stacks_rows() -> None:
    rows = [
        TokenRow(ids_S=torch.tensor([i, 5]), labels_S=torch.tensor([5, 6]), document_ids_S=None)
        for i in range(3)
    ]
    batch = collate(rows)
    assert batch.ids_BS.tolist() == [[0, 5], [1, 5], [2, 5]]
    assert batch.labels_BS.tolist() == [[5, 6]] * 3
    assert batch.document_ids_BS is None
