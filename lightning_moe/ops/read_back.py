"""Numbers to and from a device without making the host wait for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class ReadBack:
    """The values of a tensor in host memory. Their copy is made while the host goes on.

    Pickled and copied, it holds the values.

    Args:
        tensor: on any device; it must not change afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.detach()
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty_like(self._values, device="cpu", pin_memory=True)
            self._values.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def values(self) -> Tensor:
        """The values; waits only where the device hasn't come to their copy yet."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        self._copied = None
        return self._values

    def __reduce__(self) -> tuple[type["ReadBack"], tuple[Tensor]]:
        return ReadBack, (self.values(),)


def numbers_on(
    device: torch.device, numbers: Sequence[int | float], dtype: torch.dtype = torch.float64
) -> Tensor:
    """The numbers as a vector on the device; `torch.tensor` would copy them from the host and wait."""
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
