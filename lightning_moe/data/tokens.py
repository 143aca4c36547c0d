"""Byte tokens and token files: arrays of ids in which EOS ends every document."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from lightning_moe.config.data import TOKEN_SUFFIXES
from lightning_moe.data.sidecar import Sidecar, read_sidecar

IdArray = npt.NDArray[np.integer]

NUM_BYTES: Final = 256
BYTE_EOS_ID: Final = 256

_SCAN_CHUNK: Final = 1 << 20
_DTYPES: Final[dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]]] = {
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
}


class ByteTokenizer:
    """Every byte is a token, 256 ends a document: no vocabulary to learn or download."""

    name: Final = "byte"
    vocab_size: Final = NUM_BYTES + 1
    eos_id: Final = BYTE_EOS_ID

    def encode(self, text: str | bytes) -> npt.NDArray[np.uint16]:
        """The bytes of `text` (UTF-8 for a str) as ids, without EOS."""
        content = text.encode() if isinstance(text, str) else text
        return np.frombuffer(content, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | IdArray) -> bytes:
        """The bytes behind `ids`, exactly those that were encoded; EOS gives none.

        Raises:
            ValueError: if an id is no byte token.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not 0 <= array.min() <= array.max() <= BYTE_EOS_ID:
            wrong = array[(array < 0) | (array > BYTE_EOS_ID)][0]
            raise ValueError(f"token id {wrong} is not a byte token (0 to {BYTE_EOS_ID})")
        return array[array < NUM_BYTES].astype(np.uint8).tobytes()


class FileTokens:
    """Ids `start` to `stop` of a token file, memory-mapped; a copy sent to a process maps it again.

    (A pickled `np.memmap` would carry the whole file.)
    """

    def __init__(self, path: Path, dtype: str, start: int, stop: int) -> None:
        self.path = path
        self.dtype = dtype
        self.start = start
        self.stop = stop
        self._array = self._map()

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: slice) -> IdArray:
        return self._array[index]

    def part(self, start: int, stop: int) -> "FileTokens":
        """Ids `start` to `stop` of this part."""
        return FileTokens(self.path, self.dtype, self.start + start, self.start + stop)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_array"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._array = self._map()

    def _map(self) -> IdArray:
        if self.path.suffix == ".npy":
            array: IdArray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        else:
            array = np.memmap(self.path, dtype=_DTYPES[self.dtype], mode="r")
        return array[self.start : self.stop]


Segment = IdArray | FileTokens


class TokenStream:
    """Several runs of ids, read as one.

    Args:
        segments: arrays or parts of files, in order.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = tuple(segments)
        self._ends = np.cumsum([len(segment) for segment in self.segments], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.segments else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Ids `start` to `stop` (cut at the end of the stream), as a new array."""
        stop = min(stop, len(self))
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[number])
            offset = end - len(self.segments[number])
            part = self.segments[number][start - offset : min(stop, end) - offset]
            parts.append(part.astype(np.int64))
            start = min(stop, end)
            number += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def chunks(self, *, start: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        """The ids from `start` on, a million at a time."""
        for position in range(start, len(self), _SCAN_CHUNK):
            yield self.read(position, position + _SCAN_CHUNK)

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """What lies before and after `position`, without reading it."""
        before: list[Segment] = []
        after: list[Segment] = []
        for segment, end in zip(self.segments, self._ends.tolist(), strict=True):
            cut = min(max(position - (end - len(segment)), 0), len(segment))
            before.append(_part(segment, 0, cut))
            after.append(_part(segment, cut, len(segment)))
        return _stream(before), _stream(after)


def _part(segment: Segment, start: int, stop: int) -> Segment:
    return segment.part(start, stop) if isinstance(segment, FileTokens) else segment[start:stop]


def _stream(segments: list[Segment]) -> TokenStream:
    return TokenStream(segment for segment in segments if len(segment))


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An opened token file and, where one lies beside it, its sidecar."""

    tokens: FileTokens
    sidecar: Sidecar | None


def open_tokens(
    path: str | Path, *, vocab_size: int, eos_id: int, dtype: str | None = None
) -> TokenFile:
    """Open a token file and check that a model with `vocab_size` ids can read it.

    Args:
        path: a `.npy` file (one dimension, uint16 or uint32) or a `.bin` file (the bare numbers).
        vocab_size: ids of the model.
        eos_id: the id that ends a document.
        dtype: numbers of a `.bin` file without a sidecar; None is uint16. The largest id is taken
            from the sidecar; without one the file is read once.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a token file, is damaged, or does not fit the model.
    """
    path = Path(path)
    if path.suffix not in TOKEN_SUFFIXES:
        raise ValueError(
            f"{path} is no token file ({' or '.join(TOKEN_SUFFIXES)}); read text with "
            f"TokenDataModule.from_text, or turn it into tokens with prepare_tokens"
        )
    if not path.is_file():
        raise FileNotFoundError(f"token file {path} does not exist; check data.paths")
    if path.stat().st_size == 0:
        raise ValueError(f"token file {path} is empty; write it anew with prepare_tokens")
    sidecar = read_sidecar(path)
    dtype = _check_dtype(path, sidecar, dtype)
    num_tokens = _count_npy(path, dtype) if path.suffix == ".npy" else _count_bin(path, dtype)
    if num_tokens == 0:
        raise ValueError(f"token file {path} holds 0 tokens; write it anew with prepare_tokens")
    if sidecar is not None and sidecar.num_tokens != num_tokens:
        raise ValueError(
            f"token file {path} holds {num_tokens} tokens but its sidecar says "
            f"num_tokens={sidecar.num_tokens}: it is truncated or was replaced; "
            f"write it anew with prepare_tokens"
        )
    tokens = FileTokens(path, dtype, 0, num_tokens)
    _check_ids(tokens, sidecar, vocab_size, eos_id)
    return TokenFile(tokens, sidecar)


def _check_dtype(path: Path, sidecar: Sidecar | None, dtype: str | None) -> str:
    if path.suffix == ".npy":
        return _read_npy(path).dtype.name
    if sidecar is None:
        return dtype or "uint16"
    if sidecar.dtype not in _DTYPES:
        raise ValueError(
            f"the sidecar of {path} says dtype={sidecar.dtype}, which is not one of "
            f"{', '.join(_DTYPES)}; write the file anew with prepare_tokens"
        )
    if dtype is not None and dtype != sidecar.dtype:
        raise ValueError(
            f"data.token_dtype={dtype} clashes with dtype={sidecar.dtype} in the sidecar of "
            f"{path}; unset data.token_dtype"
        )
    return sidecar.dtype


def _read_npy(path: Path) -> IdArray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"token file {path} can't be read as .npy ({error}); write it anew with prepare_tokens"
        ) from error
    if array.dtype not in _DTYPES.values() or array.ndim != 1:
        raise ValueError(
            f"token file {path} has dtype={array.dtype} and shape={array.shape}; "
            f"it must have one dimension of {' or '.join(_DTYPES)}"
        )
    ids: IdArray = array
    return ids


def _count_npy(path: Path, dtype: str) -> int:
    array = _read_npy(path)
    assert array.dtype.name == dtype
    return int(array.size)


def _count_bin(path: Path, dtype: str) -> int:
    size = path.stat().st_size
    num_tokens, rest = divmod(size, _DTYPES[dtype].itemsize)
    if rest:
        raise ValueError(
            f"token file {path} has {size} bytes, not a multiple of "
            f"{_DTYPES[dtype].itemsize} ({dtype}): it is truncated, or data.token_dtype is wrong; "
            f"write it anew with prepare_tokens"
        )
    return num_tokens


def _check_ids(tokens: FileTokens, sidecar: Sidecar | None, vocab_size: int, eos_id: int) -> None:
    if sidecar is not None and sidecar.eos_id != eos_id:
        raise ValueError(
            f"data.eos_id={eos_id} clashes with eos_id={sidecar.eos_id} in the sidecar of "
            f"{tokens.path}; set data.eos_id={sidecar.eos_id}"
        )
    if sidecar is not None:
        largest = sidecar.max_token_id
    else:
        largest = max(int(chunk.max()) for chunk in TokenStream([tokens]).chunks())
    if largest >= vocab_size:
        raise ValueError(
            f"token file {tokens.path} has id {largest}, outside of data.vocab_size={vocab_size}; "
            f"raise data.vocab_size to at least {largest + 1}, or check that the file holds "
            f"{tokens.dtype} tokens and not text"
        )
