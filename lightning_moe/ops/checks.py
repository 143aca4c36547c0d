"""Checks of values that lie on a device."""

import torch
from jaxtyping import Bool
from torch import Tensor


def check_on_device(condition: Bool[Tensor, ""], message: str) -> None:
    """Fail where `condition` is false, without the host waiting for it.

    On a CPU that is an error here and now. On a GPU it is one of the device, which the next thing that waits for it
    reports. Compiled code, whose ids and counts are our own, checks nothing.

    Raises:
        RuntimeError: see above.
    """
    if not torch.compiler.is_compiling():
        torch._assert_async(condition, message)
