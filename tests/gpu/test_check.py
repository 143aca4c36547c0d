"""The checks on a GPU, through pytest: `pytest -m gpu`."""

from tests.gpu.check import main


def test_everything_that_this_gpu_can_run_is_right() -> None:
    assert main([]) == 0
