"""Settings of the config tests."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def configs_check_themselves(shape_checker_off_in_module: None) -> None:
    """No shape checker in any of them."""
