"""Files from strangers: nothing in them runs, nothing but the output is written, and each is refused in one line."""

import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lightning_moe.cli import main
from lightning_moe.data import open_tokens, prepare_tokens

Make = Callable[[Path], None]


@dataclass(frozen=True)
class _Marks:
    """An object that makes a file when it is unpickled."""

    path: Path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def _marking(folder: Path) -> bytes:
    return pickle.dumps(_Marks(folder / "ran"))


def _contents(folder: Path) -> dict[str, bytes | str]:
    """Of all files below, links by what they name, without run folders and the caches of Python."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def _refused(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with, after a look at all that must not have happened."""
    before = _contents(folder)
    capsys.readouterr()
    assert main(words) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said.err.endswith(f"{lines[0]}\n")
    assert "\x1b" not in lines[0]
    after = _contents(folder)
    assert {name: after[name] for name in before} == before
    assert [name for name in after if name not in before and not name.startswith("run/")] == []
    return lines[0]


@pytest.fixture
def train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Trains on a file of this name, which must be refused; gives the line that says why."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["lightning-moe"])

    def refused(name: str) -> str:
        words = ["train", f'data.paths=["{name}"]', "hydra.run.dir=run", "trainer.max_steps=1"]
        return _refused(words, tmp_path, capsys)

    return refused


def _npy_of_objects(path: Path) -> None:
    np.save(path, np.array([_Marks(path.parent / "ran")]), allow_pickle=True)


def _npy_claiming(shape: str) -> Make:
    def make(path: Path) -> None:
        header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117)
        path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.encode() + b"\n" + bytes(64))

    return make


def _bytes(content: bytes) -> Make:
    return lambda path: path.write_bytes(content) and None


TOKEN_FILES: dict[str, tuple[str, Make, str]] = {
    "objects": ("t.npy", _npy_of_objects, "must have one dimension of uint16 or uint32"),
    "pickle as npy": ("t.npy", lambda p: _bytes(_marking(p.parent))(p), "can't be read as .npy"),
    "pickle as bin": (
        "t.bin",
        lambda p: _bytes(_marking(p.parent) + bytes(len(_marking(p.parent)) % 2))(p),
        "outside of data.vocab_size",
    ),
    "zip": ("t.npy", _bytes(b"PK\x03\x04" + bytes(60)), "can't be read as .npy"),
    "half a header": ("t.npy", _bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr'"), "one dimension of"),
    "more than any disk": ("t.npy", _npy_claiming("(99999999999999999,)"), "99999999999999999 tok"),
    "more than a number": ("t.npy", _npy_claiming("(" + "9" * 50 + ",)"), "its header says"),
    "less than nothing": ("t.npy", _npy_claiming("(-4,)"), "its header says"),
    "code as a shape": ("t.npy", _npy_claiming("(print(1),)"), "its header says"),
    "a folder": ("t.bin", Path.mkdir, "is a folder"),
    "a pipe": ("t.bin", os.mkfifo, "is no regular file"),
    "zeros without end": ("t.bin", lambda p: p.symlink_to("/dev/zero"), "is no regular file"),
    "a link to itself": ("t.bin", lambda path: path.symlink_to(path), "does not exist"),
    "a link to nothing": ("t.bin", lambda path: path.symlink_to("gone"), "does not exist"),
    "nothing inside": ("t.bin", _bytes(b""), "is empty"),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_a_token_file_is_numbers_or_refused(
    case: str, tmp_path: Path, train: Callable[[str], str]
) -> None:
    name, make, message = TOKEN_FILES[case]
    make(tmp_path / name)
    line = train(name)
    assert message in line
    assert name in line
    assert not (tmp_path / "ran").exists()


SIDECARS: dict[str, tuple[Make, str]] = {
    "pickle": (lambda path: _bytes(_marking(path.parent))(path), "is not JSON"),
    "deep": (_bytes(b"[" * 60_000), "is not JSON"),
    "large": (_bytes(bytes(1 << 20)), "is no sidecar"),
    "long number": (_bytes(b'{"num_tokens": ' + b"9" * 9_000 + b"}"), "is not JSON"),
    "no JSON": (_bytes(b"\xff\xfe{"), "is not JSON"),
    "a list": (_bytes(b"[]"), "holds no mapping"),
    "nothing inside": (_bytes(b""), "is not JSON"),
    "a pipe": (os.mkfifo, "is no sidecar"),
    "a folder": (Path.mkdir, "is no sidecar"),
    "zeros without end": (lambda path: path.symlink_to("/dev/zero"), "is no sidecar"),
}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A token file whose sidecar may be replaced."""
    (tmp_path / "a.txt").write_text("some text")
    prepare_tokens(tmp_path / "a.txt", tmp_path / "t.bin")
    return tmp_path / "t.bin.json"


@pytest.mark.parametrize("case", SIDECARS)
def test_a_sidecar_is_a_small_mapping_or_refused(
    case: str, prepared: Path, train: Callable[[str], str]
) -> None:
    make, message = SIDECARS[case]
    prepared.unlink()
    make(prepared)
    line = train("t.bin")
    assert message in line
    assert "t.bin.json" in line
    assert not (prepared.parent / "ran").exists()


@pytest.mark.parametrize("value", ["\x1b[31m<script>alert(1)</script>\n../../x", -1, [], None])
def test_a_sidecar_says_what_its_file_shows_and_nothing_else(
    value: object, prepared: Path, train: Callable[[str], str]
) -> None:
    fields = json.loads(prepared.read_text())
    for field in set(fields) - {"tokenizer"}:
        prepared.write_text(json.dumps(fields | {field: value}))
        with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} is not valid")):
            open_tokens(prepared.with_suffix(""), vocab_size=264, eos_id=256)
    assert " is not valid" in train("t.bin")


TOKENIZERS: dict[str, Make] = {
    "pickle": lambda path: _bytes(_marking(path.parent))(path),
    "deep": _bytes(b"[" * 60_000),
    "no text": _bytes(b"\xff\xfe\x00"),
    "nothing inside": _bytes(b""),
    "half": _bytes(b'{"version": "1.0", "model": {"type": "BP'),
    "another kind": _bytes(b'{"auto_map": {"AutoTokenizer": "evil.py"}}'),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.fixture
def prepare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Prepares with these words, which must be refused; gives the line that says why."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    return lambda *words: _refused(["prepare", *words], tmp_path, capsys)


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_is_data_or_refused(
    case: str, tmp_path: Path, prepare: Callable[..., str]
) -> None:
    pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")
    TOKENIZERS[case](tmp_path / "tokenizer.json")
    line = prepare(
        "a.txt", "--output=t.bin", "--tokenizer=tokenizer.json", "--eos-token=\x1b[31m</s>"
    )
    assert "tokenizer='tokenizer.json' is " in line
    assert not (tmp_path / "ran").exists()


SOURCES: dict[str, tuple[str, Make, str]] = {
    "a pipe": ("b.txt", os.mkfifo, "is no regular file"),
    "a folder": ("b.txt", Path.mkdir, "is a folder"),
    "zeros without end": ("b.txt", lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    "a link to itself": ("b.txt", lambda path: path.symlink_to(path), "does not exist"),
    "no name": ("b" * 300, lambda _: None, "does not exist"),
    "bytes": (os.fsdecode(b"\xff\x1b[31m.txt"), Path.mkdir, "is a folder"),
    "tokens": ("b.bin", _bytes(b"text"), "is a token file among text"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_text_is_a_file_or_refused(
    case: str, tmp_path: Path, prepare: Callable[..., str]
) -> None:
    name, make, message = SOURCES[case]
    make(tmp_path / name)
    assert message in prepare(name, "--output=t.bin")


def test_a_name_that_no_file_can_have_is_told_as_the_system_does(
    prepare: Callable[..., str],
) -> None:
    assert "File name too long" in prepare("a.txt", f"--output={'t' * 300}.bin")


@pytest.mark.parametrize("output", ["t.bin", "t.bin.json"])
def test_the_output_replaces_files_only(
    output: str, tmp_path: Path, prepare: Callable[..., str]
) -> None:
    (tmp_path / output).mkdir()
    assert "exists and is no file" in prepare("a.txt", "--output=t.bin", "--overwrite")


@pytest.mark.parametrize("output", ["t.bin", "new/../t.npy", "./t.bin"])
def test_only_the_output_and_its_sidecar_are_written(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "new").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "outside").write_text("mine")
    for name in ("t.bin", "t.npy", "t.bin.json", "t.npy.json"):
        Path(name).symlink_to(tmp_path / "outside")
    odd = "\x1b[31m$(touch ran);<b>\n.txt"
    Path(odd).write_text("some text")
    before = _contents(tmp_path)
    assert main(["prepare", "*.txt", f"--output={output}", "--overwrite"]) == 0
    after = _contents(tmp_path)
    name = f"work/{Path(output).name}"
    assert {changed for changed in after if after[changed] != before.get(changed)} == {
        name,
        f"{name}.json",
    }
    assert (tmp_path / "outside").read_text() == "mine"
