"""The command line of a child rank."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_moe.strategy.launchers import _before_options, _quoted


def test_a_child_keeps_the_subcommand_and_the_place_of_the_options_but_not_the_sweep() -> None:
    words = ["train", "-m", "lr=1,2", "--config-name", "other", "-cd=conf", "hydra.sweep.dir=x"]
    assert _before_options(words) == ["train", "--config-name", "other", "-cd=conf"]
    assert _before_options(["lr=1,2", "-m"]) == []


@pytest.mark.parametrize(
    "text", ["plain", "a, b=c", 'say "hi"', "back\\slash", "end\\", 'a\\"b', "a'b", "{x: 1}"]
)
def test_any_text_survives_hydras_grammar(text: str) -> None:
    [override] = OverridesParser.create().parse_overrides([f"++a.b={_quoted(text)}"])
    assert override.value() == text
