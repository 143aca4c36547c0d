"""Files that are whole or not there."""

from pathlib import Path

import pytest

from lightning_moe.files import atomic_write


def test_a_file_has_its_name_only_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "numbers.bin"
    with atomic_write(path) as file:
        file.write(b"12")
        assert not path.exists()
        file.write(b"34")
    assert path.read_bytes() == b"1234"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_older_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half of the ne", None])  # type: ignore[list-item]  # what fails half-way
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
