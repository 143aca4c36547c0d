"""Tokenizers that `prepare_tokens` can use: bytes, or a Hugging Face `tokenizer.json`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from lightning_moe.data.tokens import ByteTokenizer, IdArray

SpecialTokens = Literal["text", "ids"]


@runtime_checkable
class Tokenizer(Protocol):
    """Turns the text of one document into ids."""

    @property
    def name(self) -> str:
        """For the sidecar."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id, the end of a document included, plus one; there may be gaps below."""
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

    What the file says about inference is left out: truncation, padding, tokens around a text, and
    the dropout of merges, which would make two runs differ.

    Args:
        path: the file.
        eos_token: the text of the token that ends a document.
        special_tokens: what the text of a special token within a document becomes: `text`, which
            is never the id of a special token, or `ids`.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package `tokenizers` is missing.
        ValueError: if the file is not a tokenizer or does not know `eos_token`.
    """

    def __init__(self, path: Path, eos_token: str, *, special_tokens: SpecialTokens) -> None:
        try:
            from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ImportError(
                f"tokenizer={str(path)!r} needs the package tokenizers; "
                f"install it with: pip install 'lightning-moe[hf]'"
            ) from error
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer={str(path)!r} is neither 'byte' nor a file")
        with _refused(f"tokenizer={str(path)!r} is no tokenizer.json"):
            self._backend = Backend.from_str(path.read_text(encoding="utf-8"))
        eos_id = self._backend.token_to_id(eos_token)
        if eos_id is None:
            special = sorted(self._special_tokens().values())
            raise ValueError(
                f"eos_token={eos_token!r} is not in {path}; its special tokens are "
                f"{', '.join(special) or 'none'}"
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        if hasattr(self._backend.model, "dropout"):
            self._backend.model.dropout = None
        self._backend.add_special_tokens([eos_token])
        self._backend.encode_special_tokens = special_tokens == "text"
        self._kept_out = self._special_tokens() if special_tokens == "text" else {}
        self.name = path.name
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id: int = eos_id

    def encode(self, text: bytes) -> IdArray:
        """Ids of a UTF-8 text; bytes that are no UTF-8 become the replacement character.

        Raises:
            ValueError: if the tokenizer has no ids for it, or only that of a special token.
        """
        return np.array(self._ids(text.decode("utf-8", errors="replace")), dtype=np.uint32)

    def _special_tokens(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {id: token.content for id, token in added.items() if token.special}

    def _ids(self, text: str) -> list[int]:
        with _refused("the tokenizer can't encode it"):
            encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        cuts = self._cuts(text, ids, encoding.offsets)
        if not cuts:
            return ids
        parts = (text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]))
        return [id for part in parts for id in self._ids(part)]

    def _cuts(self, text: str, ids: list[int], spans: list[tuple[int, int]]) -> list[int]:
        """Where to cut `text` so that none of its parts is the text of a special token.

        The package finds special tokens before the model, which it can be told not to; but words
        of the model's own vocabulary can be special as well.
        """
        cuts = []
        for i in np.flatnonzero(np.isin(ids, list(self._kept_out))):
            start, stop = spans[i]
            # The token for unknown text is special too, but stands for other texts.
            if ids[i] != self.eos_id and text[start:stop].strip() != self._kept_out[ids[i]]:
                continue
            if stop - start < 2:  # noqa: PLR2004 - nothing to cut
                raise ValueError(
                    f"the tokenizer gives the special token {self._kept_out[ids[i]]!r} for the "
                    f"text {text[start:stop]!r}; if it is eos_token, choose another one"
                )
            cuts.append((start + stop) // 2)
        return cuts


@contextmanager
def _refused(message: str) -> Iterator[None]:
    """Turn errors of the package into a ValueError: it raises bare Exception, or panics."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is no Exception, and its class can't be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{message} ({error})") from error
        raise


def load_tokenizer(name: str, eos_token: str | None, special_tokens: SpecialTokens) -> Tokenizer:
    """The tokenizer called `byte`, or the one in the file `name`.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package `tokenizers` is missing.
        ValueError: if `eos_token` is missing, an option has no effect, or the file is not a
            tokenizer.
    """
    if name == ByteTokenizer.name:
        if eos_token is not None:
            raise ValueError(
                f"eos_token={eos_token!r} has no effect with tokenizer='byte', "
                f"where {ByteTokenizer.eos_id} ends a document; unset it"
            )
        if special_tokens != "text":
            raise ValueError(
                f"special_tokens={special_tokens!r} has no effect with tokenizer='byte', "
                f"where no text is a special token; unset it"
            )
        return ByteTokenizer()
    if eos_token is None:
        raise ValueError(
            f"tokenizer={name!r} needs eos_token, the text of the token that ends a document"
        )
    return HuggingFaceTokenizer(Path(name), eos_token, special_tokens=special_tokens)
