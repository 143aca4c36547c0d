"""Configs from plain mappings (YAML, Hydra) and back, with errors that name the full option."""

import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

ConfigT = TypeVar("ConfigT")

Plain = bool | int | float | str | list["Plain"] | dict["str | int", "Plain"] | None


def from_mapping(cls: type[ConfigT], mapping: Mapping[str, object], path: str = "model") -> ConfigT:
    """Build the config dataclass `cls`, its nested sections included, from plain values.

    Lists become tuples and integers become floats where those are due, and text keys such as "3"
    become layer numbers. Values that are built already are taken as they are. A `cls` with a method
    `complete` gets the options by it, after their names are checked.

    Args:
        cls: a config dataclass.
        mapping: option names and values, as YAML gives them.
        path: full name of this section, for messages.

    Raises:
        ValueError: if an option is unknown or a required one is missing.
        TypeError: if a section is not a mapping, or `cls` refuses the type of a value.
    """
    mapping = _mapping(mapping, path)
    known = {option.name: option for option in fields(cls)}  # type: ignore[arg-type]  # any dataclass
    _refuse_unknown(mapping, known, path)
    complete: Callable[[Mapping[str, object]], Mapping[str, object]] | None
    complete = getattr(cls, "complete", None)
    if complete is not None:
        mapping = complete(mapping)
    hints = get_type_hints(cls)
    values = {
        str(name): _convert(hints[name], value, f"{path}.{name}") for name, value in mapping.items()
    }
    missing = [name for name, option in known.items() if name not in values and _required(option)]
    if missing:
        raise ValueError(f"{path}.{missing[0]} is required; set it")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        # A section checks itself under its usual name and cannot know that it sits in an override.
        error.add_note(f"while building {path}")
        raise


def to_mapping(config: object) -> dict[str | int, Plain]:
    """All options of a config dataclass as plain values that YAML and `torch.load` accept.

    `from_mapping(type(config), to_mapping(config))` equals `config`.

    Raises:
        TypeError: if `config` is no dataclass or holds a value that is not plain.
    """
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"to_mapping needs a config dataclass, got {config!r}")
    return {option.name: _to_plain(getattr(config, option.name)) for option in fields(config)}


def _refuse_unknown(
    mapping: Mapping[str, object], known: Mapping[str, Field[Any]], path: str
) -> None:
    for name in mapping:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = (
                f"did you mean {path}.{close[0]}?" if close else f"choose from {', '.join(known)}"
            )
            raise ValueError(f"{path}.{name} is not an option; {hint}")


def _required(option: Field[Any]) -> bool:
    return option.default is MISSING and option.default_factory is MISSING


def _convert(hint: object, value: object, path: str) -> object:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    origin = get_origin(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return value if isinstance(value, hint) else from_mapping(hint, _mapping(value, path), path)
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        item_hint = get_args(hint)[0]
        return tuple(_convert(item_hint, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return _numbered(get_args(hint)[1], value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _mapping(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{path}={value!r} must be a mapping of options")
    return value


def _numbered(hint: object, mapping: Mapping[object, object], path: str) -> dict[object, object]:
    result: dict[object, object] = {}
    for key, value in mapping.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        if number in result:
            raise ValueError(f"{path}[{number}] is given twice, as a number and as text; keep one")
        result[number] = _convert(hint, value, f"{path}[{number}]")
    return result


def _to_plain(value: object) -> Plain:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return to_mapping(value)
