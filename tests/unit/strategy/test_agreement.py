"""What ranks agree on, as far as it needs no ranks."""

import os
import signal

import pytest

from lightning_moe import FP8Config, MoEConfig
from lightning_moe.strategy.agreement import refuse_different
from lightning_moe.strategy.joint_ends import is_sized
from lightning_moe.strategy.stop_signal import StopRequest


def test_equal_options_pass() -> None:
    refuse_different([{"lr": 0.1, "trainer.max_steps": 3}] * 3)


def test_an_option_that_differs_is_named_with_both_values_and_the_rank() -> None:
    with pytest.raises(ValueError, match=r"lr is 0\.1 on rank 0 and 0\.2 on rank 2"):
        refuse_different([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])


def test_of_configs_that_differ_the_innermost_option_is_named() -> None:
    up, down = (
        MoEConfig(backend="mxfp8", fp8=FP8Config(scale_mode=mode)) for mode in ("rceil", "floor")
    )
    refuse_different([{"moe": up}, {"moe": MoEConfig(backend="mxfp8")}])
    with pytest.raises(ValueError, match=r"^moe\.fp8\.scale_mode is rceil on rank 0 and floor on"):
        refuse_different([{"moe": up}, {"moe": down}])
    with pytest.raises(ValueError, match=r"^moe is MoEConfig\(.* on rank 0 and None on rank 1"):
        refuse_different([{"moe": up}, {"moe": None}])


def test_an_option_that_only_one_rank_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"b is 2 on rank 0 and missing on rank 1"):
        refuse_different([{"a": 1, "b": 2}, {"a": 1}])
    with pytest.raises(ValueError, match=r"b is missing on rank 0 and 2 on rank 1"):
        refuse_different([{"a": 1}, {"a": 1, "b": 2}])


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
