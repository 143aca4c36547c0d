"""Byte tokens, token files and what opening one checks."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe.data import ByteTokenizer, TokenFile, TokenStream, open_tokens, prepare_tokens
from lightning_moe.data import tokens as tokens_module


def open_file(path: Path, vocab_size: int = 264, **options: str) -> TokenFile:
    return open_tokens(path, vocab_size=vocab_size, eos_id=256, **options)


def prepared(folder: Path, name: str = "corpus.bin") -> Path:
    (folder / "a.txt").write_bytes(b"abc")
    (folder / "b.txt").write_bytes(b"\xff\x00")
    prepare_tokens([str(folder / "*.txt")], folder / name)
    return folder / name


@given(st.binary(max_size=20))
def test_decoding_is_the_exact_inverse_of_encoding(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
    assert ids == [*text, 256]
    assert tokenizer.decode(ids) == text


def test_text_is_encoded_as_utf8() -> None:
    assert ByteTokenizer().encode("é").tolist() == [0xC3, 0xA9]


def test_an_id_that_is_no_byte_token_is_not_decoded() -> None:
    with pytest.raises(ValueError, match=r"token id 257 is not a byte token \(0 to 256\)"):
        ByteTokenizer().decode([65, 257])


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.npy"])
def test_an_opened_file_holds_the_documents_with_their_ends(tmp_path: Path, name: str) -> None:
    file = open_file(prepared(tmp_path, name))
    assert file.tokens[:].tolist() == [97, 98, 99, 256, 255, 0, 256]
    assert file.sidecar is not None
    assert file.sidecar.num_bytes == 5
    assert file.sidecar.num_documents == 2
    assert file.sidecar.max_token_id == 256


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.npy"])
def test_a_pickled_part_of_a_file_carries_its_place_and_not_its_tokens(
    tmp_path: Path, name: str
) -> None:
    part = open_file(prepared(tmp_path, name)).tokens.part(2, 5)
    assert b"_array" not in pickle.dumps(part)
    assert pickle.loads(pickle.dumps(part))[:].tolist() == [99, 256, 255]


def test_bare_numbers_are_read_as_the_type_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    np.array([1, 70_000], dtype=np.uint32).tofile(path)
    assert open_file(path, vocab_size=70_001, dtype="uint32").tokens[:].tolist() == [1, 70_000]


def test_a_stream_joins_its_parts_and_splits_without_copying() -> None:
    array = np.arange(10, dtype=np.uint16)
    stream = TokenStream([array[:3], array[3:4], array[4:]])
    assert stream.read(2, 6).tolist() == [2, 3, 4, 5]
    assert stream.read(8, 99).tolist() == [8, 9]
    before, after = stream.split(5)
    assert before.read(0, 99).tolist() == [0, 1, 2, 3, 4]
    assert after.read(0, 99).tolist() == [5, 6, 7, 8, 9]
    assert all(np.shares_memory(part, array) for part in before.segments + after.segments)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"token file .*gone.npy does not exist; check"):
        open_file(tmp_path / "gone.npy")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.txt", b"hello", "text.txt is no token file (.npy or .bin); read text with"),
        ("empty.bin", b"", "empty.bin is empty"),
        ("cut.bin", b"\x01\x00\x02", "cut.bin has 3 bytes, not a multiple of 2 (uint16)"),
        ("text.bin", b"some text\n", "text.bin has id 30821, outside of data.vocab_size=264"),
        ("text.npy", b"some text\n", "text.npy can't be read as .npy"),
        ("cut.npy", b"\x93NUMPY\x01", "cut.npy can't be read as .npy"),
    ],
)
def test_a_file_that_is_no_token_file_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_file(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, dtype=np.int64), "its header says \"{'descr': '<i8'"),
        (np.zeros(3, dtype=">u2"), "low bytes first, its header says \"{'descr': '>u2'"),
        (np.zeros((2, 3), dtype=np.uint16), "must have one dimension of uint16 or uint32"),
        (np.zeros(0, dtype=np.uint16), "holds 0 tokens"),
        (np.array([{}]), "its header says \"{'descr': '|O'"),
    ],
)
def test_an_array_that_is_no_token_array_is_refused(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "wrong.npy", array)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_file(tmp_path / "wrong.npy")


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "evil.npy").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError, match=r"evil\.npy can't be read as \.npy"):
        open_file(tmp_path / "evil.npy")
    assert not (tmp_path / "ran").exists()


def test_a_truncated_file_is_caught_by_its_sidecar(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"has num_tokens=6, but its sidecar says num_tokens=7"):
        open_file(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("eos_id", 0, "data.eos_id=256 clashes with eos_id=0 in the sidecar"),
        ("dtype", "int8", "dtype='int8' is not valid"),
        ("num_tokens", True, "num_tokens=True is not valid"),
        ("num_bytes", -1, "num_bytes=-1 is not valid"),
        ("num_bytes", 50, "num_bytes=5, but its sidecar says num_bytes=50"),
        ("num_documents", 1, "num_documents=2, but its sidecar says num_documents=1"),
        ("vocab_size", 300, "vocab_size=257, but its sidecar says vocab_size=300"),
        ("max_token_id", 200, "max_token_id=256, but its sidecar says max_token_id=200"),
        ("max_token_id", 300, "max_token_id=256, but its sidecar says max_token_id=300"),
    ],
)
def test_a_sidecar_that_contradicts_its_file_is_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    path = prepared(tmp_path)
    sidecar = tmp_path / "corpus.bin.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        open_file(path)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds no mapping")])
def test_a_damaged_sidecar_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = prepared(tmp_path)
    (tmp_path / "corpus.bin.json").write_text(text)
    with pytest.raises(ValueError, match=rf"corpus\.bin\.json {message}.*write it anew"):
        open_file(path)


def test_a_given_dtype_that_contradicts_the_sidecar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.token_dtype=uint32 clashes with dtype=uint16"):
        open_file(prepared(tmp_path), dtype="uint32")


def test_an_npy_sidecar_with_another_type_is_refused(tmp_path: Path) -> None:
    path = prepared(tmp_path, "corpus.npy")
    sidecar = tmp_path / "corpus.npy.json"
    sidecar.write_text(sidecar.read_text().replace("uint16", "uint32"))
    with pytest.raises(ValueError, match=r"has dtype=uint16, but its sidecar says dtype='uint32'"):
        open_file(path)


@pytest.mark.parametrize("num_more", [-2, 2, 4])
def test_an_npy_file_has_as_many_tokens_as_its_header_says(tmp_path: Path, num_more: int) -> None:
    path = tmp_path / "raw.npy"
    np.save(path, np.arange(9, dtype=np.uint16))
    content = path.read_bytes()
    path.write_bytes(content[:num_more] if num_more < 0 else content + bytes(num_more))
    message = f"has {18 + num_more} bytes behind its header, which says 9 tokens of uint16"
    with pytest.raises(ValueError, match=message):
        open_file(path)


def test_a_header_that_asks_for_more_than_any_disk_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.npy"
    np.save(path, np.arange(9, dtype=np.uint16))
    path.write_bytes(path.read_bytes().replace(b"(9,), }" + b" " * 16, b"(99999999999999999,), }"))
    with pytest.raises(ValueError, match="which says 99999999999999999 tokens"):
        open_file(path)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (np.array([5, 256], dtype=np.uint32), "they look like uint32 rather than uint16"),
        (np.array([5, 70_000, 256], dtype=np.uint32), "they look like uint32 rather than uint16"),
        (np.array([5, 256]), "they look like uint64 rather than uint16; write it anew"),
    ],
)
def test_bare_numbers_wider_than_two_bytes_are_refused_unless_their_type_is_given(
    tmp_path: Path, numbers: np.ndarray, message: str
) -> None:
    numbers.tofile(tmp_path / "raw.bin")
    with pytest.raises(ValueError, match=message):
        open_file(tmp_path / "raw.bin", vocab_size=80_000)
    if numbers.dtype == np.uint32:
        file = open_file(tmp_path / "raw.bin", vocab_size=80_000, dtype="uint32")
        assert file.tokens[:].tolist() == numbers.tolist()


def test_bare_numbers_of_two_bytes_need_no_type(tmp_path: Path) -> None:
    np.array([5, 0, 7, 256], dtype=np.uint16).tofile(tmp_path / "raw.bin")
    assert open_file(tmp_path / "raw.bin").tokens[:].tolist() == [5, 0, 7, 256]


def test_ids_above_those_of_the_sidecar_are_refused_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared(tmp_path)
    monkeypatch.setattr(tokens_module, "_SCANNED_TOKENS", 3)  # too long to be read when opened
    np.array([1, 2, 3, 9999, 5, 6, 256], dtype=np.uint16).tofile(path)
    stream = TokenStream([open_file(path).tokens])
    assert stream.read(0, 3).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"corpus\.bin has id 9999 where 256 was said to be the"):
        stream.read(2, 5)


def test_a_vocabulary_that_is_too_small_names_the_option_that_may_be_set(tmp_path: Path) -> None:
    np.save(tmp_path / "raw.npy", np.array([60_000, 256], dtype=np.uint16))
    message = r"needs model\.vocab_size \(which data\.vocab_size must equal\) of at least 60001"
    with pytest.raises(ValueError, match=message):
        open_file(tmp_path / "raw.npy")
