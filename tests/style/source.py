"""The package's source files, parsed once for all structure tests."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_moe"


@cache
def parse_package() -> dict[Path, ast.Module]:
    """Give every module of the package by its path below the repository."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def walk_package() -> Iterator[tuple[Path, ast.AST]]:
    """Go over all nodes of all modules."""
    for path, tree in parse_package().items():
        for node in ast.walk(tree):
            yield path, node
