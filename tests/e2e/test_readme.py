"""What the README shows is run as shown, each block in a process and a folder of its own.

A bash block that cannot run here starts with `# not run: <reason>`. Blocks find a folder
`corpus/` with a text file in it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"# not run: \S")


def _blocks(language: str) -> list[object]:
    """Give the blocks of one language, named by the line they start at."""
    text = README.read_text() if README.is_file() else ""
    return [
        pytest.param(match.group(2), id=f"line-{text.count(chr(10), 0, match.start()) + 1}")
        for match in _BLOCK.finditer(text)
        if match.group(1) == language and not _NOT_RUN.match(match.group(2))
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "readme.txt").write_text(README.read_text())
    return tmp_path


def _run(command: list[str], folder: Path) -> None:
    # `lightning-moe` and `python` are those of the environment that runs this test.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def test_the_readme_exists_and_has_python_to_run() -> None:
    assert README.is_file(), f"{README.name} is missing"
    assert _blocks("python"), f"{README.name} has no ```python block"


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_block_of_the_readme_runs(code: str, folder: Path) -> None:
    # A file, not `-c`: a Trainer with several devices starts its script again.
    (folder / "block.py").write_text(code)
    _run([sys.executable, "block.py"], folder)


@pytest.mark.parametrize("code", _blocks("bash"))
def test_bash_block_of_the_readme_runs(code: str, folder: Path) -> None:
    _run(["bash", "-euo", "pipefail", "-c", code], folder)
