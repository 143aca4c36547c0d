"""Settings of the data tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def shape_checker_off() -> Iterator[None]:
    """Let the code refuse wrong types itself: the shape checker would be first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
