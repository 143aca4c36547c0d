"""Small pictures whose pixels are numbers of a palette."""

import struct
import zlib
from typing import Final

import numpy as np

EMPTY: Final = 0
"""The transparent colour."""
NUM_SHADES: Final = 101
"""Colours 1 to 101 run from blue over a neutral one to red."""

_BLUE, _NEUTRAL, _RED = (31, 92, 166), (243, 241, 238), (178, 36, 40)


def indexed_png(pixels_YX: np.ndarray) -> bytes:
    """A PNG file of 8-bit palette indices, one pixel per cell."""
    height, width = pixels_YX.shape
    rows = np.zeros((height, width + 1), dtype=np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels_YX
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*part)
        for part in (
            (b"IHDR", header),
            (b"PLTE", _palette()),
            (b"tRNS", b"\x00"),
            (b"IDAT", zlib.compress(rows.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def shade(share: float) -> tuple[int, int, int]:
    """Red, green and blue for a share in [0, 1] of the way from blue to red."""
    away, end = abs(2 * share - 1), _BLUE if 2 * share < 1 else _RED
    red, green, blue = (round(a + (b - a) * away) for a, b in zip(_NEUTRAL, end, strict=True))
    return red, green, blue


def _palette() -> bytes:
    colours = [(0, 0, 0), *(shade(number / (NUM_SHADES - 1)) for number in range(NUM_SHADES))]
    return b"".join(bytes(colour) for colour in colours)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum
