"""Settings of the config tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="module")
def shape_checker_off() -> Iterator[None]:
    """Let configs refuse wrong types themselves: the shape checker would be first.

    It also draws random numbers, which hypothesis does not allow while it builds configs.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
