"""Which float type a computation runs in."""

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: the type for numbers that must not be rounded coarsely."""
    return torch.promote_types(dtype, torch.float32)


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The type that autocast would give a matmul of `tensor`; for ops that autocast doesn't cover."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype
