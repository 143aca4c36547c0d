"""Documents: from text files, from the embedded corpus, and their split into train and validation."""

import glob
import hashlib
import os
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import dropwhile
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

    A file that several patterns match comes once, and so does a folder that symlinks give several
    names. A name is relative to the part of the pattern before the first wildcard, so it is the
    same on every machine.

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
    # os.path answers False where a Path raises: a name too long, a folder that can't be entered.
    if os.path.isdir(path):
        raise ValueError(f"{option}={pattern!r} is a folder; write {str(path / '**' / '*.txt')!r}")
    if os.path.isfile(path):
        yield path.name, path
        return
    if not glob.has_magic(pattern):
        raise FileNotFoundError(
            f"{option}={pattern!r} {'is no regular file' if os.path.exists(path) else 'does not exist'}; "
            f"check the path"
        )
    root, wildcards = _divide(path)
    files = [file for file in _matches(root, wildcards) if os.path.isfile(file)]
    if not files:
        raise FileNotFoundError(
            f"{option}={pattern!r} matches no file; check the glob ('**/' searches in sub-folders)"
        )
    for file in files:
        yield file.relative_to(root).as_posix(), file


def _divide(pattern: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder before the first wildcard, and the parts from there on."""
    parts = pattern.parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first]), parts[first:]


def _matches(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """What `glob` finds, but `**` enters each real folder once: symlinks can form loops."""
    if "**" not in parts:
        yield from sorted(root / match for match in glob.glob(str(Path(*parts)), root_dir=root))
        return
    first = parts.index("**")
    after = tuple(dropwhile(lambda part: part == "**", parts[first:]))
    roots = [root] if first == 0 else _matches(root, parts[:first])
    for folder in _folders(roots):
        yield from _matches(folder, after or ("*",))


def _folders(roots: Iterable[Path]) -> Iterator[Path]:
    """`roots` and the folders below them, without hidden ones; those behind symlinks come last."""
    waiting, seen = deque(roots), set()
    while waiting:
        for folder, names, _ in os.walk(waiting.popleft()):
            path = Path(folder)
            real = path.resolve()
            names[:] = [] if real in seen else sorted(n for n in names if not n.startswith("."))
            if real not in seen:
                seen.add(real)
                yield path
            waiting.extend(path / name for name in names if (path / name).is_symlink())


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


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], int]:
    """All documents, those to train on first, and the number of their tokens to train on.

    Tokens are bytes and one end per document. About `fraction` of them validate, in whole documents
    where these are small: a hash of the name chooses, so neither the machine nor the order of files
    matters, and a new document leaves the others where they are, mostly. None is chosen that would
    make it more than twice the share. Where less than half of the share can be held out in whole
    documents, the end of one more makes up for it: that document lies across the boundary.
    """
    sizes = [document.num_bytes() + 1 for document in documents]
    total = sum(sizes)
    wanted = fraction * total
    most = min(2 * wanted, (wanted + total) / 2)
    places = [_place(document.name) for document in documents]
    by_place = sorted(range(len(documents)), key=lambda i: (places[i], documents[i].name))
    held_out: set[int] = set()
    num_held_out = 0
    for i in by_place:
        is_chosen = places[i] < fraction or num_held_out < wanted / 2
        if is_chosen and num_held_out + sizes[i] <= most:
            held_out.add(i)
            num_held_out += sizes[i]
    num_train = total - num_held_out
    cut: list[int] = []
    if num_held_out < wanted / 2:
        # What could not be held out whole is longer than what is missing.
        cut = [next(i for i in by_place if i not in held_out)]
        num_train = round(total * (1 - fraction))
    whole = [i for i in range(len(documents)) if i not in held_out and i not in cut]
    return [documents[i] for i in [*whole, *cut, *sorted(held_out)]], num_train


def _place(name: str) -> float:
    """A number in [0, 1) that depends on `name` only."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
