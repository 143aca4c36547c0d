"""Checks of single option values, with errors that name the option in full."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Interval:
    """A range of numbers.

    Attributes:
        text: how an error message describes the range.
        contains: tells whether a number lies in the range.
    """

    text: str
    contains: Callable[[float], bool]


def between(lowest: float, highest: float, text: str) -> Interval:
    """The numbers from `lowest` to `highest`, both included."""
    return Interval(text, lambda number: lowest <= number <= highest)


POSITIVE: Final = Interval("greater than 0", lambda number: number > 0)
NON_NEGATIVE: Final = Interval("at least 0", lambda number: number >= 0)
AT_LEAST_ONE: Final = Interval("at least 1", lambda number: number >= 1)
BELOW_ONE: Final = Interval("at least 0 and below 1", lambda number: 0 <= number < 1)
FRACTION: Final = between(0.0, 1.0, "between 0 and 1")


def given(**values: object) -> dict[str, object]:
    """The options among `values` that are set, that is, not None."""
    return {name: value for name, value in values.items() if value is not None}


def check_ints(section: str, interval: Interval, **values: object) -> None:
    """Check that every value is an integer (not a bool) within `interval`.

    Raises:
        TypeError: if a value is not an integer.
        ValueError: if a value is out of range.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{section}.{name}={value!r} must be an integer, got {_kind(value)}")
        if not interval.contains(value):
            raise ValueError(f"{section}.{name}={value} must be {interval.text}")


def check_floats(section: str, interval: Interval, **values: object) -> None:
    """Check that every value is a finite number (not a bool) within `interval`.

    Raises:
        TypeError: if a value is not a number.
        ValueError: if a value is infinite, NaN or out of range.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{section}.{name}={value!r} must be a number, got {_kind(value)}")
        if not (math.isfinite(value) and interval.contains(value)):
            raise ValueError(f"{section}.{name}={value} must be finite and {interval.text}")


def check_bools(section: str, **values: object) -> None:
    """Check that every value is True or False.

    Raises:
        TypeError: if a value is anything else, 0 and 1 included.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{section}.{name}={value!r} must be true or false, got {_kind(value)}")


def check_choices(section: str, choices: tuple[str, ...], **values: object) -> None:
    """Check that every value is one of `choices`.

    Raises:
        ValueError: if a value is anything else.
    """
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{section}.{name}={value!r} must be one of {', '.join(choices)}")


def check_instances(section: str, kind: type, **values: object) -> None:
    """Check that every value is an instance of `kind`.

    Raises:
        TypeError: if a value is of another type.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"{section}.{name}={value!r} must be of type {kind.__name__}, "
                f"got {_kind(value)}; lightning_moe.config.from_mapping converts plain values"
            )


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
