"""Byte tokens and token files: arrays of ids in which EOS ends every document."""

import re
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
# Of a file up to this length every id is looked at when it is opened: a second or two.
_SCANNED_TOKENS: Final = 1 << 30
_DTYPES: Final[dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]]] = {
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
}
_REMEDY: Final = "write it anew with prepare_tokens"
# What numpy writes before a token array. Nothing in the text is evaluated.
_NPY_START: Final = re.compile(rb"\x93NUMPY\x01\x00(..)", re.DOTALL)
_NPY_HEADER: Final = re.compile(
    r"\{'descr': '<u([24])', 'fortran_order': (?:False|True), 'shape': \((\d{1,18}),\), \} *\n"
)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the ids of a file lie, and of which type they are."""

    dtype: str
    num_tokens: int
    offset: int


class FileTokens:
    """Ids `start` to `stop` of a token file, memory-mapped; a copy sent to a process maps it again.

    (A pickled `np.memmap` would carry the whole file.)

    Raises:
        ValueError: when ids are read of which one is above `max_token_id`.
    """

    def __init__(
        self, path: Path, layout: _Layout, max_token_id: int, *, start: int, stop: int
    ) -> None:
        self.path = path
        self.layout = layout
        self.max_token_id = max_token_id
        self.start = start
        self.stop = stop
        self._array = self._map()

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: slice) -> IdArray:
        ids = self._array[index]
        # Long files are not read through when they are opened, and any file can be replaced later.
        if ids.size and ids.max() > self.max_token_id:
            raise ValueError(
                f"token file {self.path} has id {ids.max()} where {self.max_token_id} was said to "
                f"be the largest, by its sidecar or when it was opened; {_REMEDY}"
            )
        return ids

    def part(self, start: int, stop: int) -> "FileTokens":
        """Ids `start` to `stop` of this part."""
        return FileTokens(
            self.path,
            self.layout,
            self.max_token_id,
            start=self.start + start,
            stop=self.start + stop,
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_array"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._array = self._map()

    def _map(self) -> IdArray:
        return _map(self.path, self.layout)[self.start : self.stop]


def _map(path: Path, layout: _Layout) -> IdArray:
    return np.memmap(
        path,
        dtype=_DTYPES[layout.dtype],
        mode="r",
        offset=layout.offset,
        shape=(layout.num_tokens,),
    )


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

    def chunks(self, *, start: int = 0, stop: int | None = None) -> Iterator[npt.NDArray[np.int64]]:
        """The ids `start` to `stop` (None is the end), a million at a time."""
        stop = len(self) if stop is None else stop
        for position in range(start, stop, _SCAN_CHUNK):
            yield self.read(position, min(position + _SCAN_CHUNK, stop))

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """The streams before and after `position`, without reading them."""
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

    A file of up to a billion ids is read once; of a longer one its sidecar is believed, and rows
    are checked when they are read.

    Args:
        path: a `.npy` file (one dimension, uint16 or uint32) or a `.bin` file (the bare numbers).
        vocab_size: ids of the model.
        eos_id: the id that ends a document.
        dtype: numbers of a `.bin` file without a sidecar; None is uint16, and refuses a file that
            could as well hold wider numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a token file, is damaged, contradicts its sidecar, or does not fit
            the model.
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
        raise ValueError(f"token file {path} is empty; {_REMEDY}")
    sidecar = read_sidecar(path)
    if sidecar is not None and sidecar.eos_id != eos_id:
        raise ValueError(
            f"data.eos_id={eos_id} clashes with eos_id={sidecar.eos_id} in the sidecar of "
            f"{path}; set data.eos_id={sidecar.eos_id}"
        )
    layout = _npy_layout(path) if path.suffix == ".npy" else _bin_layout(path, sidecar, dtype)
    if layout.num_tokens == 0:
        raise ValueError(f"token file {path} holds 0 tokens; {_REMEDY}")
    largest = _check_contents(path, layout, sidecar, eos_id)
    if sidecar is None and path.suffix == ".bin" and dtype is None:
        _refuse_wider_numbers(path, vocab_size)
    if largest >= vocab_size:
        raise ValueError(
            f"token file {path} has id {largest}, outside of data.vocab_size={vocab_size}; the "
            f"model needs model.vocab_size (which data.vocab_size must equal) of at least "
            f"{largest + 1}, unless the file holds no {layout.dtype} tokens: check "
            f"data.token_dtype, and that it is not text"
        )
    return TokenFile(FileTokens(path, layout, largest, start=0, stop=layout.num_tokens), sidecar)


def _npy_layout(path: Path) -> _Layout:
    with path.open("rb") as file:
        start = _NPY_START.fullmatch(file.read(10))
        length = int.from_bytes(start[1], "little") if start else 0
        header = file.read(length).decode("latin-1")
        offset = file.tell()
    if not start:
        raise ValueError(f"token file {path} can't be read as .npy of version 1; {_REMEDY}")
    fields = _NPY_HEADER.fullmatch(header)
    if not fields:
        raise ValueError(
            f"token file {path} must have one dimension of {' or '.join(_DTYPES)}, low bytes "
            f"first, its header says {header[:200].rstrip()!r}; {_REMEDY}"
        )
    dtype = "uint16" if fields[1] == "2" else "uint32"
    num_tokens, num_bytes = int(fields[2]), path.stat().st_size - offset
    if num_tokens * _DTYPES[dtype].itemsize != num_bytes:
        raise ValueError(
            f"token file {path} has {num_bytes} bytes behind its header, which says {num_tokens} "
            f"tokens of {dtype}: it is truncated or was put together wrongly; {_REMEDY}"
        )
    return _Layout(dtype=dtype, num_tokens=num_tokens, offset=offset)


def _bin_layout(path: Path, sidecar: Sidecar | None, dtype: str | None) -> _Layout:
    if sidecar is not None and dtype is not None and dtype != sidecar.dtype:
        raise ValueError(
            f"data.token_dtype={dtype} clashes with dtype={sidecar.dtype} in the sidecar of "
            f"{path}; unset data.token_dtype"
        )
    dtype = sidecar.dtype if sidecar is not None else dtype or "uint16"
    size, itemsize = path.stat().st_size, _DTYPES[dtype].itemsize
    if size % itemsize:
        raise ValueError(
            f"token file {path} has {size} bytes, not a multiple of {itemsize} ({dtype}): it is "
            f"truncated, or data.token_dtype is wrong; {_REMEDY}"
        )
    return _Layout(dtype=dtype, num_tokens=size // itemsize, offset=0)


def _check_contents(path: Path, layout: _Layout, sidecar: Sidecar | None, eos_id: int) -> int:
    """The largest id in the file, after a comparison of the file with its sidecar."""
    found: dict[str, str | int] = {"dtype": layout.dtype, "num_tokens": layout.num_tokens}
    if sidecar is None or layout.num_tokens <= _SCANNED_TOKENS:
        found["max_token_id"], found["num_documents"] = _scan(_map(path, layout), eos_id)
    if sidecar is None:
        return int(found["max_token_id"])
    if sidecar.tokenizer == ByteTokenizer.name:
        found["eos_id"] = ByteTokenizer.eos_id
        found["vocab_size"] = ByteTokenizer.vocab_size
        found["num_bytes"] = layout.num_tokens - sidecar.num_documents
    for name, value in found.items():
        said = getattr(sidecar, name)
        if said != value:
            raise ValueError(
                f"token file {path} has {name}={value}, but its sidecar says {name}={said!r}: "
                f"one of them was truncated or replaced; {_REMEDY}"
            )
    return sidecar.max_token_id


def _scan(ids: IdArray, eos_id: int) -> tuple[int, int]:
    """The largest id, and how often EOS occurs."""
    largest = num_ends = 0
    for start in range(0, len(ids), _SCAN_CHUNK):
        chunk = ids[start : start + _SCAN_CHUNK]
        largest = max(largest, int(chunk.max()))
        num_ends += int(np.count_nonzero(chunk == eos_id))
    return largest, num_ends


def _refuse_wider_numbers(path: Path, vocab_size: int) -> None:
    """Refuse bare numbers that are ids of the model as uint32 or 64-bit numbers as well.

    Of such numbers uint16 would make their lower halves, and zeros in between.
    """
    for wider, remedy in (
        (np.dtype(np.uint64), "write it anew as uint16 or uint32"),
        (np.dtype(np.uint32), "set data.token_dtype to uint32, or to uint16 if that is what it is"),
    ):
        if path.stat().st_size % wider.itemsize:
            continue
        ids = np.memmap(path, dtype=wider, mode="r")
        parts = (ids[i : i + _SCAN_CHUNK] for i in range(0, len(ids), _SCAN_CHUNK))
        if all(part.max() < vocab_size for part in parts):
            raise ValueError(
                f"token file {path} has no sidecar that says what its numbers are, and they look "
                f"like {wider} rather than uint16; {remedy}"
            )
