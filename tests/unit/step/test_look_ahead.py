"""Seeing items before they are handed out."""

from collections.abc import Iterator

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_moe.step.look_ahead import LookAhead


class _Positioned:
    """Letters, and how many of them were handed out."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[str]:
        for letter in "abcde":
            self.given += 1
            yield letter

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


def _ahead() -> LookAhead:
    loader = CombinedLoader(_Positioned(), "max_size_cycle")
    return LookAhead(loader, iter(loader))


def _letters(items: list[tuple[str, int, int]]) -> str:
    return "".join(item[0] for item in items)


def test_what_was_seen_still_comes_once_and_in_order() -> None:
    ahead = _ahead()
    assert next(ahead)[0] == "a"
    assert _letters(ahead.peek(2)) == "bc"
    assert _letters(ahead.peek(1)) == "b"
    assert _letters(ahead.peek(0)) == ""
    assert _letters(list(ahead)) == "bcde"


def test_at_the_end_fewer_are_seen() -> None:
    ahead = _ahead()
    assert _letters(ahead.peek(9)) == "abcde"
    assert _letters(ahead.peek(9)) == "abcde"
    assert _letters(list(ahead)) == "abcde"
    assert ahead.peek(1) == []


def test_the_position_to_save_is_that_of_the_items_handed_out() -> None:
    ahead = _ahead()
    next(ahead)
    ahead.peek(3)
    for given in (1, 2, 3, 4, 5):
        assert ahead.position() == [{"given": given}]
        next(ahead, None)
