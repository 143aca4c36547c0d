"""From a `DataConfig` to the two token streams of training and validation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_moe.config.data import DataConfig
from lightning_moe.data.corpus import (
    Document,
    embedded_documents,
    find_files,
    split_documents,
    text_documents,
)
from lightning_moe.data.tokens import (
    NUM_BYTES,
    ByteTokenizer,
    IdArray,
    TokenFile,
    TokenStream,
    open_tokens,
)

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """What to train and to validate on.

    Attributes:
        train: training tokens.
        val: validation tokens.
        val_bytes_per_token: bytes of text over tokens, counted over what validation predicts (all
            tokens but the first; EOS counts no byte); None if the bytes are not known.
        source: where they come from, in words.
    """

    train: TokenStream
    val: TokenStream
    val_bytes_per_token: float | None
    source: str


def load_splits(config: DataConfig) -> Splits:
    """Find, check and split the sources of `config`; token files are mapped, not read.

    Raises:
        FileNotFoundError: if a path does not exist or a glob matches nothing.
        ValueError: if a source is damaged, does not fit the config, or can't be split.
    """
    return _token_splits(config) if config.reads_token_files else _text_splits(config)


def encode_documents(documents: Sequence[Document], eos_id: int) -> TokenStream:
    """Byte tokens of documents in memory, EOS after each."""
    encode = ByteTokenizer().encode
    eos: IdArray = np.array([eos_id], dtype=np.min_scalar_type(eos_id))
    runs: list[IdArray] = []
    for document in documents:
        runs += [encode(document.read()), eos]
    return TokenStream([np.concatenate(runs)] if runs else [])


def _text_splits(config: DataConfig) -> Splits:
    if config.eos_id < NUM_BYTES:
        raise ValueError(
            f"data.eos_id={config.eos_id} is a byte, and text is read as bytes; "
            f"set data.eos_id={ByteTokenizer.eos_id}"
        )
    if config.paths:
        documents, num_empty = text_documents(config.paths)
        _warn_empty(num_empty)
        source = f"{len(documents)} text files"
    else:
        documents = embedded_documents()
        source = f"{len(documents)} documents of Python's standard library"
    if config.val_paths:
        val_documents, num_empty = text_documents(config.val_paths, option="data.val_paths")
        _warn_empty(num_empty)
        train = encode_documents(documents, config.eos_id)
        val = encode_documents(val_documents, config.eos_id)
    else:
        documents, num_train = split_documents(documents, config.holdout_fraction)
        train, val = encode_documents(documents, config.eos_id).split(num_train)
    return Splits(
        train=train, val=val, val_bytes_per_token=_count_bytes_per_token(val), source=source
    )


def _warn_empty(num_empty: int) -> None:
    if num_empty:
        _log.warning("left out %d empty text files", num_empty)


def _token_splits(config: DataConfig) -> Splits:
    files = _open_all(config.paths, config, "data.paths")
    train = TokenStream(file.tokens for file in files)
    val_files = _open_all(config.val_paths, config, "data.val_paths")
    if val_files:
        val = TokenStream(file.tokens for file in val_files)
    else:
        train, val = _hold_out_end(train, config)
    if all(_holds_bytes(file) for file in val_files or files):
        bytes_per_token = _count_bytes_per_token(val)
    else:
        bytes_per_token = _recorded_bytes_per_token(val_files)
    return Splits(
        train=train,
        val=val,
        val_bytes_per_token=bytes_per_token,
        source=f"{len(files) + len(val_files)} token files",
    )


def _open_all(patterns: Sequence[str], config: DataConfig, option: str) -> list[TokenFile]:
    return [
        open_tokens(
            path,
            vocab_size=config.vocab_size,
            eos_id=config.eos_id,
            dtype=config.token_dtype if path.suffix == ".bin" else None,
        )
        for _, path in find_files(patterns, option=option)
    ]


def _hold_out_end(stream: TokenStream, config: DataConfig) -> tuple[TokenStream, TokenStream]:
    """Cut off the last documents, or the end of one, for validation.

    The cut is at the end of a document if that leaves at least half of the share to validate on.
    """
    wanted = round(len(stream) * (1 - config.holdout_fraction))
    latest = (wanted + len(stream)) // 2
    position = wanted
    for chunk in stream.chunks(start=wanted, stop=latest):
        ends = np.flatnonzero(chunk == config.eos_id)
        if ends.size:
            return stream.split(position + int(ends[0]) + 1)
        position += len(chunk)
    return stream.split(wanted)


def _holds_bytes(file: TokenFile) -> bool:
    return file.sidecar is not None and file.sidecar.tokenizer == ByteTokenizer.name


def _count_bytes_per_token(stream: TokenStream) -> float | None:
    num_targets = len(stream) - 1
    if num_targets < 1:
        return None
    return sum(int((chunk < NUM_BYTES).sum()) for chunk in stream.chunks(start=1)) / num_targets


def _recorded_bytes_per_token(files: Sequence[TokenFile]) -> float | None:
    """From sidecars; the first token, which is not predicted, counts as an average one."""
    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    if not sidecars or len(sidecars) < len(files):
        return None
    return sum(s.num_bytes for s in sidecars) / sum(s.num_tokens for s in sidecars)
