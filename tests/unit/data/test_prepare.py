"""Token files: equal for any number of workers, complete or absent."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_moe.data import ByteTokenizer, open_tokens, prepare_tokens, progress_bar
from lightning_moe.data import prepare as prepare_module
from lightning_moe.data.corpus import Document, text_documents
from lightning_moe.data.splits import encode_documents

EOS = "<eos>"


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A glob of five texts, one of them empty, one not Unicode."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate([b"one", b"", b"three\n", b"\xff\xfe", b"f" * 40]):
        (folder / f"{i}.txt").write_bytes(text)
    return str(folder / "*.txt")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_equals_the_tokens_in_memory_byte_for_byte(texts: str, tmp_path: Path) -> None:
    sidecar = prepare_tokens([texts], tmp_path / "out.bin")
    in_memory = encode_documents(text_documents([texts])[0], ByteTokenizer.eos_id)
    expected = in_memory.read(0, len(in_memory)).astype(np.uint16)
    assert (tmp_path / "out.bin").read_bytes() == expected.tobytes()
    assert sidecar.num_tokens == len(expected)
    assert (sidecar.num_documents, sidecar.num_bytes) == (4, 51)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_two_workers_write_the_same_file_as_one(
    texts: str, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK_BYTES", 3)  # a job per document
    for num_workers in (1, 2):
        prepare_tokens([texts], tmp_path / f"{num_workers}{suffix}", num_workers=num_workers)
    one, two = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
    assert one.read_bytes() == two.read_bytes()
    assert (tmp_path / f"1{suffix}.json").read_text() == (tmp_path / f"2{suffix}.json").read_text()


def test_numpy_reads_the_npy_file(texts: str, tmp_path: Path) -> None:
    prepare_tokens([texts], tmp_path / "out.npy", dtype="uint32")
    array = np.load(tmp_path / "out.npy", allow_pickle=False)
    assert array.dtype == np.uint32
    assert bytes(array[array < 256].astype(np.uint8)) == b"onethree\n\xff\xfe" + b"f" * 40


def test_a_failure_leaves_nothing(
    texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK_BYTES", 3)
    before = names(tmp_path)

    def stop(num_done: int, _: int) -> None:
        if num_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_tokens([texts], tmp_path / "out.bin", progress=stop)
    assert names(tmp_path) == before


def test_a_document_that_vanishes_in_a_worker_leaves_nothing_and_is_named(
    texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(tmp_path)
    gone = Document(name="gone", path=tmp_path / "gone.txt")
    monkeypatch.setattr(Document, "num_bytes", lambda _: 1)
    monkeypatch.setattr(
        prepare_module, "text_documents", lambda *_, **__: ([*text_documents([texts])[0], gone], 0)
    )
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        prepare_tokens([texts], tmp_path / "out.bin", num_workers=2)
    assert names(tmp_path) == before


def test_a_failure_leaves_the_file_that_was_to_be_replaced(texts: str, tmp_path: Path) -> None:
    prepare_tokens([texts], tmp_path / "out.bin")
    before = (tmp_path / "out.bin").read_bytes()

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_tokens([texts], tmp_path / "out.bin", overwrite=True, progress=stop)
    assert (tmp_path / "out.bin").read_bytes() == before
    open_tokens(tmp_path / "out.bin", vocab_size=257, eos_id=256)


def test_an_existing_file_is_replaced_only_on_request(texts: str, tmp_path: Path) -> None:
    (tmp_path / "out.bin").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"out\.bin exists; pass overwrite=True"):
        prepare_tokens([texts], tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == b"precious"
    prepare_tokens([texts], tmp_path / "out.bin", overwrite=True)
    assert open_tokens(tmp_path / "out.bin", vocab_size=257, eos_id=256).sidecar is not None


def test_one_source_need_not_be_a_list(texts: str, tmp_path: Path) -> None:
    assert prepare_tokens(texts, tmp_path / "out.bin").num_documents == 4


def test_no_source_takes_the_embedded_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        prepare_module, "embedded_documents", lambda: [Document(name="a", content=b"abc")]
    )
    assert prepare_tokens([], tmp_path / "out.bin").num_bytes == 3


def test_progress_ends_at_the_number_of_documents(texts: str, tmp_path: Path) -> None:
    seen = []
    prepare_tokens([texts], tmp_path / "out.bin", progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (4, 4)
    with progress_bar() as progress:
        prepare_tokens([texts], tmp_path / "again.bin", progress=progress)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 must be at least 1"),
        ({"dtype": "int8"}, "dtype='int8' must be one of auto, uint16, uint32"),
        ({"eos_token": "</s>"}, "eos_token='</s>' has no effect with tokenizer='byte'"),
        ({"tokenizer": "t.json"}, "tokenizer='t.json' needs eos_token"),
        ({"special_tokens": "ids"}, "special_tokens='ids' has no effect with tokenizer='byte'"),
        ({"special_tokens": "all"}, "special_tokens='all' must be text or ids"),
        ({"output": "out.txt"}, "output='out.txt' must end in .npy or .bin"),
    ],
)
@pytest.mark.usefixtures("shape_checker_off")
def test_an_option_that_cannot_work_is_refused(
    texts: str, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_tokens([texts], **({"output": tmp_path / "out.bin"} | options))


def test_a_missing_folder_is_named(texts: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        prepare_tokens([texts], tmp_path / "nowhere" / "out.bin")


def test_without_the_package_the_extra_is_named(
    texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-moe\[hf\]'"):
        prepare_tokens([texts], tmp_path / "o.bin", tokenizer="words.json", eos_token=EOS)


@pytest.mark.parametrize("name", ["out.bin", "out.bin.json"])
def test_what_is_read_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / name)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"would replace .*b\.txt, which is read"):
        prepare_tokens(str(tmp_path / "*.txt"), tmp_path / "out.bin", overwrite=True)
    assert (tmp_path / name).read_bytes() == b"precious"


def test_a_symlink_is_replaced_and_not_what_it_points_to(texts: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out.bin").symlink_to(tmp_path / "precious")
    prepare_tokens(texts, tmp_path / "out.bin", overwrite=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "out.bin").is_symlink()
