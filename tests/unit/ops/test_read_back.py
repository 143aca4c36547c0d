"""Reading numbers back from a device. That the host doesn't wait is shown in tests/cuda."""

import copy
import pickle

import torch

from lightning_moe.ops.read_back import ReadBack, numbers_on


def test_values_are_those_of_the_tensor_without_its_gradient() -> None:
    weight = torch.tensor([1.0, -2.5], requires_grad=True)
    values = ReadBack(weight * 2).values()
    assert values.tolist() == [2.0, -5.0]
    assert not values.requires_grad


def test_copies_and_pickles_hold_the_values() -> None:
    read_back = ReadBack(torch.tensor([3, 4]))
    for other in (copy.deepcopy(read_back), pickle.loads(pickle.dumps(read_back))):
        assert other.values().tolist() == [3, 4]


def test_numbers_keep_their_order_and_get_the_type() -> None:
    found = numbers_on(torch.device("cpu"), (7.0, -7.0))
    assert found.dtype == torch.float64
    assert found.tolist() == [7.0, -7.0]
    whole = numbers_on(torch.device("cpu"), (2**40, 0), torch.int64)
    assert whole.tolist() == [2**40, 0]
