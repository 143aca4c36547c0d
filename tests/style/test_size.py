"""Sizes: long files and functions are listed for a look; a file over 500 lines fails."""

import ast
import warnings
from pathlib import Path

import pytest

from tests.style.sizes import LONG_FILE, count_lines, long_files, table
from tests.style.source import walk_package


def test_no_file_is_over_500_lines() -> None:
    sizes = count_lines("lightning_moe")
    assert {str(path): size for path, size in sizes.items() if size > 500} == {}


@pytest.mark.filterwarnings("always")
def test_long_files_and_functions_are_listed_as_warnings() -> None:
    for path, size in long_files(count_lines("lightning_moe")).items():
        warnings.warn(f"{path}: {size} lines; is it still one idea?", stacklevel=1)
    for path, node in walk_package():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > 60:
                message = f"{path}:{node.lineno}: {node.name} has {size} lines"
                warnings.warn(message, stacklevel=1)


def test_the_table_adds_up_floors_and_lists_them_from_the_lowest() -> None:
    folder = Path("lightning_moe")
    package = {folder / "ops/a.py": 7, folder / "ops/b.py": 2, folder / "module.py": LONG_FILE + 1}
    lines = table(package, {Path("tests/c.py"): 1000}).splitlines()
    shown = {line.split()[0]: line.split()[1] for line in lines}
    assert (shown["ops"], shown["module"], shown["nn"]) == ("9", "351", "0")
    assert (shown["package"], shown["tests"], shown["both"]) == ("360", "1,000", "1,360")
    names = [line.split()[0] for line in lines]
    assert names.index("ops") < names.index("nn") < names.index("module") < names.index("cli")
    assert long_files(package) == {"lightning_moe/module.py": 351}
