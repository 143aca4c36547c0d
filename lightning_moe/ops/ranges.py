"""Named ranges in torch's profilers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

_OFF: Final = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """What runs inside is shown as `lightning_moe.NAME` by torch's profiler, and by Lightning's `PyTorchProfiler`.

    Without a running profiler, and in compiled code, which shows as a whole, nothing happens.
    """
    # torch's own context manager costs microseconds also where nobody listens.
    if torch.compiler.is_compiling() or not torch._C._autograd._profiler_enabled():
        return _OFF
    return torch.profiler.record_function(f"lightning_moe.{name}")
