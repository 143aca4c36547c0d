"""What ranks agree on, as far as it needs no ranks."""

import os
import signal

import pytest

from lightning_moe.strategy.agreement import StopRequest, is_sized, refuse_different


def test_equal_options_pass() -> None:
    refuse_different([{"lr": 0.1, "trainer.max_steps": 3}] * 3)


def test_an_option_that_differs_is_named_with_both_values_and_the_rank() -> None:
    with pytest.raises(ValueError, match=r"lr is 0\.1 on rank 0 and 0\.2 on rank 2"):
        refuse_different([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])


def test_a_signal_is_remembered_and_nothing_else_happens() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    stop.install([signal.SIGUSR1])
    try:
        assert stop.received == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_generator_has_no_size() -> None:
    assert is_sized([1, 2])
    assert not is_sized(iter([1, 2]))
