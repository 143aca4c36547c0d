"""What every module must keep: imports alone, no print, no environment switches."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.style.source import ROOT, parse_package, walk_package

# One process imports what is slow, then forks once per module: each starts without the package.
_IMPORT_EACH_ALONE = """
import importlib, os, sys, traceback
import torch, lightning, torchmetrics
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(name)
"""


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _may_know_its_surroundings(path: Path) -> bool:
    """The command line; and what starts ranks, which torch and Lightning address by environment variables."""
    return path.parts[1] == "cli" or path.parts[1:] == ("strategy", "launchers.py")


def test_every_module_imports_alone() -> None:
    names = [_module_name(path) for path in parse_package()]
    command = [sys.executable, "-c", _IMPORT_EACH_ALONE, *names]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_only_cli_and_the_launcher_print_read_the_environment_or_know_hydra() -> None:
    found = [
        f"{path}:{node.lineno}: {use}"
        for path, node in walk_package()
        if not _may_know_its_surroundings(path) and (use := _forbidden_use(node))
    ]
    assert found == []


def _forbidden_use(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
        return "print()"
    if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}:
        return ast.unparse(node)
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    bad = [
        n
        for n in names
        if n in {"os.environ", "os.getenv"} or n.split(".")[0] in {"hydra", "omegaconf"}
    ]
    return f"import of {bad[0]}" if bad else None
