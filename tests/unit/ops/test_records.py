"""The routing record as a value."""

import dataclasses
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from lightning_moe.ops import Routing


def _record() -> Routing:
    counts = torch.tensor([2, 1])
    return Routing(
        requested_E=counts,
        kept_E=counts,
        score_sums_E=torch.tensor([0.25, 0.75]),
        logz_squared=torch.tensor(4.0),
        num_tokens=torch.tensor(3),
    )


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _record().num_tokens = torch.tensor(0)


def test_tree_functions_reach_its_tensors_and_give_a_record_back() -> None:
    leaves, spec = pytree.tree_flatten([_record(), None])
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 5
    (same, _) = pytree.tree_unflatten(leaves, spec)
    assert isinstance(same, Routing)
    assert same.requested_BE is None
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, _record())
    assert isinstance(doubled, Routing)
    assert doubled.requested_E.tolist() == [4, 2]
    assert doubled.num_tokens.item() == 6


def test_a_record_can_be_pickled() -> None:
    same = pickle.loads(pickle.dumps(_record()))
    assert same.score_sums_E.tolist() == [0.25, 0.75]
