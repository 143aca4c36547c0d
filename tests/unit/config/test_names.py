"""Options whose names users may add to."""

from collections.abc import Callable

import pytest

from lightning_moe.config.names import OptionNames
from lightning_moe.nn import register_attention_backend, register_expert_backend


def test_a_name_is_accepted_once_it_is_added_and_errors_list_it() -> None:
    names = OptionNames("model.moe.taste", ("sweet", "sour"))
    with pytest.raises(ValueError, match=r"model\.moe\.taste='hot' must be one of sweet, sour$"):
        names.check("hot")
    names.add("hot")
    names.check("hot")
    with pytest.raises(ValueError, match=r"must be one of sweet, sour, hot$"):
        names.check(None)


@pytest.mark.parametrize(
    ("register", "taken"),
    [
        (register_expert_backend, "model.moe.backend='loop'"),
        (register_attention_backend, "model.attention.backend='sdpa'"),
    ],
)
def test_a_taken_name_is_refused(register: Callable[[str, object], None], taken: str) -> None:
    name = taken.split("'")[1]
    with pytest.raises(ValueError, match=f"{taken} is registered already"):
        register(name, lambda *_: None)
