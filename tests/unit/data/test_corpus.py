"""Documents from files and from Python itself, and their split."""

import re
import sysconfig
from pathlib import Path

import pytest

from lightning_moe.data.corpus import (
    Document,
    embedded_documents,
    find_files,
    split_documents,
    text_documents,
)


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_globs_search_sub_folders_and_name_files_from_the_wildcard_on(tmp_path: Path) -> None:
    write(tmp_path, b="b", a="a", sub__c="c")
    documents, num_empty = text_documents([str(tmp_path / "**" / "*.txt")])
    assert [document.name for document in documents] == ["a.txt", "b.txt", "sub/c.txt"]
    assert [document.read() for document in documents] == [b"a", b"b", b"c"]
    assert num_empty == 0


def test_a_relative_glob_gives_the_names_of_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, a="a", sub__c="c")
    absolute = [name for name, _ in find_files([str(tmp_path / "**" / "*.txt")])]
    monkeypatch.chdir(tmp_path)
    assert [name for name, _ in find_files(["**/*.txt"])] == absolute == ["a.txt", "sub/c.txt"]
    assert [name for name, _ in find_files(["./sub/*.txt"])] == ["c.txt"]


def test_a_file_that_two_patterns_match_comes_once(tmp_path: Path) -> None:
    write(tmp_path, b="b", a="a")
    patterns = [str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]
    assert [name for name, _ in find_files(patterns)] == ["a.txt", "b.txt"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert [name for name, _ in find_files([str(tmp_path / "a[1].txt")])] == ["a[1].txt"]


def test_empty_files_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, a="", b="b")
    documents, num_empty = text_documents([str(tmp_path / "*.txt")])
    assert [document.name for document in documents] == ["b.txt"]
    assert num_empty == 1


def test_text_that_is_not_unicode_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x80")
    assert text_documents([str(tmp_path / "a.txt")])[0][0].read() == b"\xff\xfe\x80"


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path, a="", b="")
    with pytest.raises(ValueError, match=r"all 2 files are empty"):
        text_documents([str(tmp_path / "*.txt")])


def test_a_glob_without_files_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"data.paths='no\*where' matches no file"):
        find_files(["no*where"])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"data.val_paths='gone.txt' does not exist"):
        find_files(["gone.txt"], option="data.val_paths")


def test_a_folder_is_refused_with_the_glob_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"is a folder; write '{tmp_path}/**/*.txt'")):
        find_files([str(tmp_path)])


def test_a_token_file_among_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    with pytest.raises(ValueError, match=r"a\.bin is a token file among text"):
        text_documents([str(tmp_path / "*")])


def test_the_embedded_corpus_is_the_library_without_tests_and_installed_packages() -> None:
    documents = embedded_documents()
    names = [document.name for document in documents]
    assert len(set(names)) == len(names)
    assert {"json/decoder.py", "pydoc_data/topics/assert"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages"}
    assert 5e6 < sum(document.num_bytes() for document in documents) < 20e6
    path = Path(sysconfig.get_path("stdlib"), "json", "decoder.py")
    assert documents[names.index("json/decoder.py")].read() == path.read_bytes()


def documents(*names: str) -> list[Document]:
    return [Document(name=name, content=name.encode()) for name in names]


def test_the_split_depends_on_names_only_and_a_new_document_moves_no_other() -> None:
    names = [f"{i}.txt" for i in range(200)]
    train, val = split_documents(documents(*names), 0.1)
    assert sorted(d.name for d in train + val) == sorted(names)
    assert 8 <= len(val) <= 35
    _, again = split_documents(documents(*reversed(names), "new.txt"), 0.1)
    assert {d.name for d in again} - {"new.txt"} == {d.name for d in val}


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_both_sides_of_a_split_get_a_document(fraction: float) -> None:
    train, val = split_documents(documents("a", "b", "c"), fraction)
    assert train
    assert val


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="1 document can't be split"):
        split_documents(documents("a"), 0.5)
