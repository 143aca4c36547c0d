"""Documents from files and from Python itself, and their split."""

import glob
import re
import sysconfig
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_each_folder_is_entered_once_whatever_symlinks_say(tmp_path: Path) -> None:
    write(tmp_path, a="a", sub__c="c")
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "sub" / "again").symlink_to(tmp_path / "sub")
    (tmp_path / "aaa").symlink_to(tmp_path / "sub")
    files = find_files([str(tmp_path / "**" / "*.txt")])
    # A name doesn't lead through a symlink where there is one that does not.
    assert [name for name, _ in files] == ["a.txt", "sub/c.txt"]


def test_a_folder_behind_a_symlink_is_searched(tmp_path: Path) -> None:
    write(tmp_path, other__c="c")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "more").symlink_to(tmp_path / "other")
    assert [name for name, _ in find_files([str(tmp_path / "corpus" / "**" / "*.txt")])] == [
        "more/c.txt"
    ]


@pytest.mark.parametrize(
    "pattern",
    ["**/*.txt", "**", "**/**/*.txt", "s*/**", "**/d*/**/*.txt", "*/*.txt", "[s]ub/**/?.txt"],
)
def test_globs_find_what_the_standard_library_finds(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, a="a", sub__c="c", _hidden="h")
    (tmp_path / "sub" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "sub" / "deep" / "er" / "d.txt").write_text("d")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "e.txt").write_text("e")
    expected = set(glob.glob(pattern, root_dir=tmp_path, recursive=True))
    found = [path for _, path in find_files([str(tmp_path / pattern)])]
    assert found == sorted(tmp_path / name for name in expected if (tmp_path / name).is_file())


def test_a_name_that_no_file_can_have_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"data.paths='aaa.*' does not exist"):
        find_files(["a" * 5000])


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


def held_out(texts: list[Document], fraction: float) -> list[str]:
    """Names of the documents that are for validation as a whole."""
    ordered, num_train = split_documents(texts, fraction)
    starts = accumulate((text.num_bytes() + 1 for text in ordered), initial=0)
    return [text.name for text, start in zip(ordered, starts, strict=False) if start >= num_train]


def test_the_split_depends_on_names_only_and_a_new_document_moves_no_other() -> None:
    names = [f"{i}.txt" for i in range(200)]
    ordered, _ = split_documents(documents(*names), 0.1)
    val = held_out(documents(*names), 0.1)
    assert sorted(d.name for d in ordered) == sorted(names)
    assert 8 <= len(val) <= 35
    again = held_out(documents(*reversed(names), "new.txt"), 0.1)
    assert {*again} - {"new.txt"} == {*val}


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=30),
    st.sampled_from([0.02, 0.05, 0.3, 0.5, 0.9]),
)
def test_validation_gets_between_half_and_twice_its_share_of_any_sizes(
    sizes: list[int], fraction: float
) -> None:
    texts = [Document(name=str(i), content=b"x" * size) for i, size in enumerate(sizes)]
    ordered, num_train = split_documents(texts, fraction)
    total = sum(sizes) + len(sizes)
    assert sorted(text.name for text in ordered) == sorted(text.name for text in texts)
    assert fraction / 2 * total - 1 <= total - num_train <= 2 * fraction * total + 1
    assert num_train >= (1 - fraction) / 2 * total - 1


def test_at_most_one_document_lies_across_the_boundary() -> None:
    texts = [Document(name=name, content=b"x" * 999) for name in "abc"]
    ordered, num_train = split_documents(texts, 0.1)
    # No document of 1,000 tokens fits into twice 300 of 3,000.
    assert (len(ordered), num_train) == (3, 2700)
    assert held_out(texts, 0.1) == []
