"""One factor on many tensors of mixed types and devices."""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def multiply_(tensors: Iterable[Tensor], factor: Float[Tensor, ""]) -> None:
    """Multiply all tensors in place, each in its own type; reads nothing back to the host."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in by_kind.items():
        torch._foreach_mul_(group, factor.to(device=device, dtype=dtype))
