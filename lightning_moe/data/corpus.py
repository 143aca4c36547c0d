"""Documents: from text files, from the embedded corpus, and their split into train and validation."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Final

from lightning_moe.config.data import TOKEN_SUFFIXES

# Tests are no prose to learn from and are left out by many distributors; the rest of this list
# differs between two builds of one Python version, or repeats the topics.
_SKIPPED_FOLDERS: Final = ("site-packages", "dist-packages", "test", "tests", "idle_test")
_SKIPPED_PREFIXES: Final = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
_SKIPPED_FILES: Final = ("pydoc_data/topics.py",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text.

    Attributes:
        name: relative to the folder that was searched, with `/`; decides the split.
        path: the file; None if `content` holds the text.
        content: the text of a document without a file.
    """

    name: str
    path: Path | None = None
    content: bytes = b""

    def num_bytes(self) -> int:
        """Length of the text, without reading it."""
        return len(self.content) if self.path is None else self.path.stat().st_size

    def read(self) -> bytes:
        """The bytes of the text, whatever their encoding."""
        return self.content if self.path is None else self.path.read_bytes()


def find_files(patterns: Sequence[str], *, option: str = "data.paths") -> list[tuple[str, Path]]:
    """Files behind paths and globs (`**` is recursive) with their names, sorted by name.

    A file that several patterns match comes once. A name is relative to the part of the pattern
    before the first wildcard, so it is the same on every machine.

    Raises:
        FileNotFoundError: if a path does not exist or a glob matches no file.
        ValueError: if a path is a folder.
    """
    found: dict[Path, tuple[str, Path]] = {}
    for pattern in patterns:
        for name, path in _match(pattern, option):
            found.setdefault(path.resolve(), (name, path))
    return sorted(found.values(), key=lambda file: (file[0], str(file[1])))


def _match(pattern: str, option: str) -> Iterator[tuple[str, Path]]:
    path = Path(pattern)
    if path.is_dir():
        raise ValueError(f"{option}={pattern!r} is a folder; write {str(path / '**' / '*.txt')!r}")
    if path.is_file():
        yield path.name, path
        return
    if not glob.has_magic(pattern):
        raise FileNotFoundError(f"{option}={pattern!r} does not exist; check the path")
    files = [match for match in map(Path, glob.glob(pattern, recursive=True)) if match.is_file()]
    if not files:
        raise FileNotFoundError(
            f"{option}={pattern!r} matches no file; check the glob ('**/' searches in sub-folders)"
        )
    root = _folder_before_wildcard(path)
    for file in files:
        yield file.relative_to(root).as_posix(), file


def _folder_before_wildcard(pattern: Path) -> Path:
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first])


def text_documents(
    patterns: Sequence[str], *, option: str = "data.paths"
) -> tuple[list[Document], int]:
    """One document per text file, sorted by name, and the number of empty files left out.

    Raises:
        FileNotFoundError: if a path does not exist or a glob matches no file.
        ValueError: if a file holds tokens, a path is a folder, or all files are empty.
    """
    files = find_files(patterns, option=option)
    for _, path in files:
        if path.suffix in TOKEN_SUFFIXES:
            raise ValueError(
                f"{option}: {path} is a token file among text; read token files with "
                f"TokenDataModule.from_tokens"
            )
    documents = [Document(name=name, path=path) for name, path in files if path.stat().st_size]
    if not documents:
        raise ValueError(
            f"{option}={tuple(patterns)}: all {len(files)} files are empty; give files with text"
        )
    return documents, len(files) - len(documents)


def embedded_documents() -> list[Document]:
    """The corpus that needs no file: sources and help topics of the running Python, about 13 MB.

    Tests, installed packages and files that differ between builds are left out; what remains is the
    same for one Python version unless a distributor removed parts of the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    sources = [
        Document(name=name, path=root / name)
        for name in names
        if _is_source(PurePosixPath(name)) and (root / name).stat().st_size
    ]
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return sources + [
        Document(name=f"pydoc_data/topics/{name}", content=topics[name].encode())
        for name in sorted(topics)
    ]


def _is_source(name: PurePosixPath) -> bool:
    folders = name.parts[:-1]
    return (
        not any(folder in _SKIPPED_FOLDERS for folder in folders)
        and not name.parts[0].startswith(_SKIPPED_PREFIXES)
        and str(name) not in _SKIPPED_FILES
    )


def split_documents(
    documents: Sequence[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents; about `fraction` of them, at least one, validate.

    A hash of the name decides, so neither the machine nor the order of files matters, and a new
    document leaves the others where they are. Both keep the order of `documents`.

    Raises:
        ValueError: if there are fewer than two documents.
    """
    if len(documents) < 2:  # noqa: PLR2004 - one document for each side
        raise ValueError(f"{len(documents)} document can't be split into training and validation")
    places = [_place(document.name) for document in documents]
    held_out = {i for i, place in enumerate(places) if place < fraction}
    by_place = sorted(range(len(documents)), key=lambda i: (places[i], documents[i].name))
    held_out = (held_out or {by_place[0]}) - {by_place[-1]}
    train = [document for i, document in enumerate(documents) if i not in held_out]
    val = [document for i, document in enumerate(documents) if i in held_out]
    return train, val


def _place(name: str) -> float:
    """A number in [0, 1) that depends on `name` only."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
