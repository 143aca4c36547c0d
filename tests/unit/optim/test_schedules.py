"""Learning rates: each step's factor by hand, and what the Trainer makes of them."""

import math
from pathlib import Path

import pytest

from lightning_moe import MoEModule, OptimConfig
from lightning_moe.optim import learning_rate_factor
from tests.kit.runs import make_batches, make_module, run, tiny_config


def _factors(config: OptimConfig, num_steps: int, total: int | None = None) -> list[float]:
    total = config.total if total is None else total
    return [learning_rate_factor(config, done, total) for done in range(num_steps)]


def test_a_warm_up_of_three_steps_gives_one_two_and_three_thirds() -> None:
    factors = _factors(OptimConfig(warmup=3), 5)
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_a_warm_up_in_tokens_starts_at_zero() -> None:
    config = OptimConfig(warmup=100, unit="tokens")
    factors = [learning_rate_factor(config, tokens, None) for tokens in (0, 25, 99, 100, 10**9)]
    assert factors == pytest.approx([0, 0.25, 0.99, 1, 1])


def test_cosine_falls_from_the_end_of_the_warm_up_to_the_minimum_and_stays() -> None:
    config = OptimConfig(schedule="cosine", warmup=2, total=6, min_lr_ratio=0.1)
    half = 1 / math.sqrt(2)
    cosine = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    expected = [0.5, 1, *(0.1 + 0.9 * value for value in cosine)]
    # Step 1 ends the warm-up at the peak; step 2 is where the cosine begins, there too.
    assert _factors(config, 8) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "decay"),
    [
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("1-sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
    ],
)
def test_wsd_is_flat_until_its_decay_which_ends_at_the_total(
    shape: str, decay: list[float]
) -> None:
    config = OptimConfig(
        schedule="wsd", warmup=2, total=9, decay=4, decay_shape=shape, min_lr_ratio=0.2
    )
    expected = [0.5, 1, 1, 1, 1, *(0.2 + 0.8 * value for value in decay), 0.2]
    assert _factors(config, 11) == pytest.approx(expected)


def test_a_total_of_the_trainer_replaces_a_missing_one() -> None:
    config = OptimConfig(schedule="wsd", decay=2)
    assert _factors(config, 5, total=4) == pytest.approx([1, 1, 1, 0.5, 0])


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.schedule=cosine needs an end; set optim.total or"):
        learning_rate_factor(OptimConfig(schedule="cosine"), 0, None)


def test_phases_longer_than_the_run_are_refused() -> None:
    config = OptimConfig(schedule="wsd", warmup=3, decay=4)
    with pytest.raises(
        ValueError, match=r"optim.warmup=3 and optim.decay=4 don't fit into 6 steps"
    ):
        learning_rate_factor(config, 3, 6)


def test_phases_that_fill_the_run_exactly_are_accepted() -> None:
    config = OptimConfig(schedule="wsd", warmup=3, decay=4)
    assert _factors(config, 8, total=7) == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.75, 0.5, 0.25, 0])


def _logged_rates(
    folder: Path, optim: OptimConfig, num_batches: int, **options: object
) -> list[float]:
    module = make_module(tiny_config(), MoEModule, optim)
    batches = make_batches([(8, 4)] * num_batches)
    return [step["train/lr"] for step in run(folder, module, batches, **options).steps]


def test_the_warm_up_counts_optimizer_steps_and_not_micro_batches(tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, warmup=3)
    rates = _logged_rates(tmp_path, optim, 12, accumulate_grad_batches=4)
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])


def test_the_schedule_ends_with_the_optimizer_steps_of_the_run(tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, schedule="wsd", decay=2)
    rates = _logged_rates(tmp_path, optim, 9, accumulate_grad_batches=2)
    # Four windows of two and one of one.
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 5e-4])


def test_a_schedule_in_tokens_counts_labelled_tokens(tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, unit="tokens", warmup=96)
    # Two micro-batches of 12 labels per step.
    rates = _logged_rates(tmp_path, optim, 12, accumulate_grad_batches=2)
    assert rates == pytest.approx([0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_a_second_fit_starts_a_schedule_in_tokens_anew(tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-3, unit="tokens", warmup=48)
    module = make_module(tiny_config(), MoEModule, optim)
    batches = make_batches([(8, 4)] * 3)
    for _ in range(2):
        rates = [step["train/lr"] for step in run(tmp_path, module, batches).steps]
        assert rates == pytest.approx([0, 0.25e-3, 0.5e-3])


def test_an_endless_run_cannot_have_a_schedule_that_ends(tmp_path: Path) -> None:
    optim = OptimConfig(schedule="cosine")
    with pytest.raises(ValueError, match=r"set optim.total or trainer.max_steps"):
        _logged_rates(tmp_path, optim, 2, max_epochs=-1)
