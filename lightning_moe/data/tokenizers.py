"""Tokenizers that `prepare_tokens` can use: bytes, or a Hugging Face `tokenizer.json`."""

from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lightning_moe.data.tokens import ByteTokenizer, IdArray


@runtime_checkable
class Tokenizer(Protocol):
    """Turns the text of one document into ids."""

    @property
    def name(self) -> str:
        """For the sidecar."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of a document included."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""
        ...

    def encode(self, text: bytes) -> IdArray:
        """Ids of a text, without EOS."""
        ...


class HuggingFaceTokenizer:
    """The tokenizer in a `tokenizer.json`; nothing in the file is executed.

    Args:
        path: the file.
        eos_token: the text of the token that ends a document.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package `tokenizers` is missing.
        ValueError: if the file is not a tokenizer or does not know `eos_token`.
    """

    def __init__(self, path: Path, eos_token: str) -> None:
        try:
            from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ImportError(
                f"tokenizer={str(path)!r} needs the package tokenizers; "
                f"install it with: pip install 'lightning-moe[hf]'"
            ) from error
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer={str(path)!r} is neither 'byte' nor a file")
        try:
            self._backend = Backend.from_str(path.read_text(encoding="utf-8"))
        # The package raises bare Exception.
        except Exception as error:
            raise ValueError(f"tokenizer={str(path)!r} is no tokenizer.json ({error})") from error
        eos_id = self._backend.token_to_id(eos_token)
        if eos_id is None:
            added = self._backend.get_added_tokens_decoder().values()
            special = sorted(token.content for token in added)
            raise ValueError(
                f"eos_token={eos_token!r} is not in {path}; its special tokens are "
                f"{', '.join(special) or 'none'}"
            )
        self.name = path.name
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_id: int = eos_id

    def encode(self, text: bytes) -> IdArray:
        """Ids of a UTF-8 text; bytes that are no UTF-8 become the replacement character."""
        content = text.decode("utf-8", errors="replace")
        encoding = self._backend.encode(content, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)


@lru_cache(maxsize=1)
def load_tokenizer(name: str, eos_token: str | None) -> Tokenizer:
    """The tokenizer called `byte`, or the one in the file `name`; a process loads it once.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package `tokenizers` is missing.
        ValueError: if `eos_token` is missing, has no effect, or the file is not a tokenizer.
    """
    if name == ByteTokenizer.name:
        if eos_token is not None:
            raise ValueError(
                f"eos_token={eos_token!r} has no effect with tokenizer='byte', "
                f"where {ByteTokenizer.eos_id} ends a document; unset it"
            )
        return ByteTokenizer()
    if eos_token is None:
        raise ValueError(
            f"tokenizer={name!r} needs eos_token, the text of the token that ends a document"
        )
    return HuggingFaceTokenizer(Path(name), eos_token)
