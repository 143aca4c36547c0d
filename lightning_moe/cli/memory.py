"""Fewer page faults on a CPU: glibc keeps freed memory instead of giving it back."""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_KEPT_BYTES: Final = 1 << 30


def keep_freed_memory() -> bool:
    """Let this process reuse freed buffers of up to 1 GiB; whether that is possible here.

    By default glibc maps every large buffer anew and unmaps it when it is freed, so each step pays for clearing all
    its pages: an MoE layer on the CPU ran 1.4 to 1.8 times as fast without that, with twice the memory. Does nothing
    without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        # An older glibc refuses a threshold above 32 MiB; no mapping at all is what remains.
        maps_less = mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_MAX, 0)
        return bool(maps_less and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    # macOS and musl have no mallopt, Windows no library without a name.
    except (AttributeError, OSError, TypeError):
        return False
