"""Whatever the reference shows says what it is."""

import importlib
import inspect

import pytest

from tests.style.source import ROOT

SHOWN = [
    line.removeprefix("::: ")
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for line in page.read_text().splitlines()
    if line.startswith("::: ")
]


@pytest.mark.parametrize("module_name", SHOWN)
def test_every_exported_class_and_function_has_a_docstring(module_name: str) -> None:
    module = importlib.import_module(module_name)
    exported = {name: getattr(module, name) for name in module.__all__}
    assert exported, f"{module_name}.__all__ is empty"
    bare = [
        name for name, value in exported.items() if _can_have_docstring(value) and not _docs(value)
    ]
    assert bare == []


def _can_have_docstring(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)


def _docs(value: object) -> str:
    doc = value.__doc__ or ""
    # A dataclass without a docstring gets its own signature as one.
    name = getattr(value, "__name__", "")
    return "" if doc.startswith(f"{name}(") else doc
