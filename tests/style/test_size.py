"""Sizes: long files and functions are listed for a look; a file over 500 lines fails."""

import ast
import warnings

import pytest

from tests.style.source import ROOT, parse_package, walk_package


def test_no_file_is_over_500_lines() -> None:
    sizes = {path: len((ROOT / path).read_text().splitlines()) for path in parse_package()}
    assert {str(path): size for path, size in sizes.items() if size > 500} == {}


@pytest.mark.filterwarnings("always")
def test_long_files_and_functions_are_listed_as_warnings() -> None:
    for path in parse_package():
        size = len((ROOT / path).read_text().splitlines())
        if size > 400:
            warnings.warn(f"{path}: {size} lines; is it still one idea?", stacklevel=1)
    for path, node in walk_package():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > 80:
                message = f"{path}:{node.lineno}: {node.name} has {size} lines"
                warnings.warn(message, stacklevel=1)
