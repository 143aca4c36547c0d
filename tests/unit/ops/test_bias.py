"""The rule that moves the expert bias."""

import torch

from lightning_moe.ops import updated_score_bias


def test_step_by_hand() -> None:
    # Mean load 25.
    bias = updated_score_bias(torch.zeros(4), torch.tensor([10, 30, 40, 20]), 0.01)
    torch.testing.assert_close(bias, torch.tensor([0.01, -0.01, -0.01, 0.01]))


def test_only_the_side_of_the_mean_counts_not_the_distance() -> None:
    near = updated_score_bias(torch.zeros(3), torch.tensor([10, 11, 9]), 0.5)
    far = updated_score_bias(torch.zeros(3), torch.tensor([10, 20, 0]), 0.5)
    assert near.tolist() == far.tolist() == [0.0, -0.5, 0.5]


def test_an_even_or_empty_step_moves_nothing_exactly() -> None:
    bias = torch.tensor([0.3, -0.1, 0.7])
    for load in ([4, 4, 4], [0, 0, 0]):
        assert torch.equal(updated_score_bias(bias, torch.tensor(load), 1e-3), bias)


def test_a_mean_that_is_no_integer_splits_its_neighbours() -> None:
    # Mean 7/3.
    bias = updated_score_bias(torch.zeros(3), torch.tensor([2, 3, 2]), 1.0)
    assert bias.tolist() == [1.0, -1.0, 1.0]


def test_counts_beyond_float32_still_tell_one_token_apart() -> None:
    busy = 2**40
    load = torch.tensor([busy + 1, busy, busy - 1])
    assert updated_score_bias(torch.zeros(3), load, 1.0).tolist() == [-1.0, 0.0, 1.0]


def test_ten_steps_are_ten_float32_additions_exactly() -> None:
    bias, by_hand = torch.tensor([0.5, -0.5]), [torch.tensor(0.5), torch.tensor(-0.5)]
    step = torch.tensor(1e-3)
    for _ in range(10):
        bias = updated_score_bias(bias, torch.tensor([0, 6]), 1e-3)
        by_hand = [by_hand[0] + step, by_hand[1] - step]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.stack(by_hand))
    torch.testing.assert_close(bias, torch.tensor([0.51, -0.51]))


def test_the_mean_of_the_bias_may_drift() -> None:
    # Three experts below the mean, one above: +3 -1 steps.
    bias = updated_score_bias(torch.zeros(4), torch.tensor([1, 1, 1, 9]), 0.25)
    assert bias.sum().item() == 0.5


def test_the_old_bias_is_left_alone() -> None:
    bias = torch.zeros(2)
    updated_score_bias(bias, torch.tensor([0, 1]), 1.0)
    assert bias.tolist() == [0.0, 0.0]


def test_centring_takes_the_drift_away_and_leaves_differences() -> None:
    plain = centred = torch.zeros(4)
    for _ in range(1000):
        plain = updated_score_bias(plain, torch.tensor([1000, 1, 1, 1]), 1e-3)
        centred = updated_score_bias(centred, torch.tensor([1000, 1, 1, 1]), 1e-3, centered=True)
        assert abs(centred.double().mean().item()) < 1e-7
    torch.testing.assert_close(plain, torch.tensor([-1.0, 1, 1, 1]), rtol=1e-4, atol=0)
    torch.testing.assert_close(plain.mean(), torch.tensor(0.5), rtol=1e-4, atol=0)
    torch.testing.assert_close(centred, torch.tensor([-1.5, 0.5, 0.5, 0.5]), rtol=1e-4, atol=0)


def test_centring_changes_no_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(50, 4, generator=generator)
    load = torch.tensor([9, 2, 4, 5])
    start = torch.tensor([0.3, -0.1, 0.2, 0.9])
    plain = updated_score_bias(start, load, 0.1)
    centred = updated_score_bias(start, load, 0.1, centered=True)
    assert (plain - centred).max() > 0.1
    assert torch.equal((scores + plain).argsort(dim=-1), (scores + centred).argsort(dim=-1))
