"""Activations kept in host memory until backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

# Below this a copy costs more time than it saves memory.
MIN_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor's values in host memory, and where they came from.

    Attributes:
        values: in pinned memory where the device can read that by itself.
        device: of the original.
    """

    values: Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "HostCopy":
        """Start the copy; it is ordered like all other work of the device's current stream."""
        values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return cls(values.copy_(tensor, non_blocking=True), tensor.device)

    def restored(self) -> Tensor:
        """A new tensor like the original, on its device."""
        return torch.empty_like(self.values, device=self.device).copy_(
            self.values, non_blocking=True
        )


@contextmanager
def offloaded(module: nn.Module) -> Iterator[None]:
    """Copies what autograd saves meanwhile to host memory, and back when backward reads it.

    Weights of `module` stay where they are, and so do tensors in host memory: on a CPU nothing is copied. A recomputed
    part saves its inputs only, which are copied as well.
    """
    stays = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor | HostCopy:
        if tensor.device.type == "cpu" or tensor.nbytes < MIN_BYTES:
            return tensor
        if tensor.untyped_storage().data_ptr() in stays:
            return tensor
        return HostCopy.of(tensor)

    def unpack(packed: Tensor | HostCopy) -> Tensor:
        return packed.restored() if isinstance(packed, HostCopy) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
