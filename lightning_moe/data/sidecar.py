"""The JSON file beside a token file that says what the numbers in it are."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, get_args

from lightning_moe.config.data import TokenDtype

_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """Facts about a token file that its bytes do not tell.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocab_size: the largest id of the tokenizer, the end of a document included, plus one.
        eos_id: the token that ends a document.
        num_tokens: tokens in the file, ends of documents included.
        num_documents: ends of documents in the file.
        num_bytes: bytes of text behind the tokens; ends of documents count none.
        tokenizer: `byte`, or the name of the tokenizer's file.
        max_token_id: largest id in the file.
    """

    dtype: str
    vocab_size: int
    eos_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    tokenizer: str
    max_token_id: int

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def sidecar_path(token_path: Path) -> Path:
    """Where the sidecar of a token file lies: `train.bin` has `train.bin.json`."""
    return token_path.with_name(token_path.name + ".json")


def read_sidecar(token_path: Path) -> Sidecar | None:
    """The sidecar of a token file, or None where there is none.

    Raises:
        ValueError: if the file is not a sidecar.
    """
    path = sidecar_path(token_path)
    if not path.exists():
        return None
    remedy = f"write it anew with prepare_tokens, or remove it to read {token_path.name} as raw"
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is no sidecar: a small file of JSON; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping; {remedy}")
    known = {field.name: field.type for field in fields(Sidecar)}
    for name, kind in known.items():
        if not _is_valid(name, kind, content.get(name)):
            raise ValueError(f"{path}: {name}={content.get(name)!r} is not valid; {remedy}")
    return Sidecar(**{name: content[name] for name in known})


def _is_valid(name: str, kind: object, value: object) -> bool:
    # bool is an int in Python, but not a count.
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        return False
    return name != "dtype" or value in get_args(TokenDtype)
