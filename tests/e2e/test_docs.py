"""What README.md and docs/ show is run as shown, each block in a folder of its own.

A bash block that cannot run here starts with `# not run: <reason>`. Blocks find a folder
`corpus/` with a text file in it.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# The commands of docs/findings.md take minutes: test_findings_page.py runs them with fewer steps.
PAGES = [README, *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "findings.md"})]
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"# not run: \S")


def _blocks(language: str) -> list[object]:
    """Give the blocks of one language, named by the page and line they start at."""
    return [
        pytest.param(match.group(2), id=f"{page.name}-{text.count(chr(10), 0, match.start()) + 1}")
        for page in PAGES
        for text in [page.read_text()]
        for match in _BLOCK.finditer(text)
        if match.group(1) == language and not _NOT_RUN.match(match.group(2))
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "readme.txt").write_text(README.read_text() * 2)
    monkeypatch.chdir(tmp_path)
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


# Lightning says so of every other precision than float32.
@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
@pytest.mark.parametrize("code", _blocks("python"))
def test_python_block_runs(code: str, folder: Path) -> None:
    (folder / "block.py").write_text(code)
    # A script with a guard is started once per rank; others are spared a process that imports torch again. A block with
    # a strategy needs the guard: a process group that it left here would change the blocks after it.
    if '__name__ == "__main__"' in code:
        _run([sys.executable, "block.py"], folder)
    else:
        runpy.run_path("block.py", run_name="__main__")


@pytest.mark.parametrize("code", _blocks("bash"))
def test_bash_block_runs(code: str, folder: Path) -> None:
    _run(["bash", "-euo", "pipefail", "-c", code], folder)


def test_three_uses_of_the_readme_are_run_and_fit_on_a_screen_or_two() -> None:
    run = [block.id for block in (*_blocks("python"), *_blocks("bash"))]
    assert sum(name.startswith("README.md") for name in run) == 3
    assert len(README.read_text().splitlines()) <= 150
