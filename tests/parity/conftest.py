"""The other implementation, imported when a test of this tier runs."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """`tests.parity.hf`; an ImportError where transformers is missing, never a skip."""
    return importlib.import_module("tests.parity.hf")
