"""Options that single layers inherit from the model where their own plain options leave them out."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass


def complete_overrides(options: Mapping[str, object]) -> Mapping[str, object]:
    """Plain options of a model, with each of `layer_overrides` completed by the model's own `attention` and `moe`.

    Sections that are built already stay as they are, and so do values of a wrong type: building them raises the error.
    """
    overrides = options.get("layer_overrides")
    if not isinstance(overrides, Mapping):
        return options
    completed = {
        layer: _complete(override, layer, options) for layer, override in overrides.items()
    }
    # Last, so that an error in an inherited option names the model's own section.
    others = {name: value for name, value in options.items() if name != "layer_overrides"}
    return {**others, "layer_overrides": completed}


def _complete(override: object, layer: object, options: Mapping[str, object]) -> object:
    if not isinstance(override, Mapping):
        return override
    inherited = {"attention": _attention_of(layer, options), "moe": options.get("moe")}
    return {name: _over(inherited.get(name), value) for name, value in override.items()}


def _attention_of(layer: object, options: Mapping[str, object]) -> object:
    attention, windows = options.get("attention", {}), options.get("window_pattern")
    is_number = isinstance(layer, int) or (isinstance(layer, str) and layer.isdecimal())
    if is_number and isinstance(windows, Sequence) and not isinstance(windows, str) and windows:
        window = windows[int(str(layer)) % len(windows)]
        return _over(attention, {"sliding_window": window})
    return attention


def _over(inherited: object, own: object) -> object:
    """`own` options, and those of `inherited` that it doesn't name, section by section."""
    if not isinstance(own, Mapping):
        return own
    if is_dataclass(inherited) and not isinstance(inherited, type):
        inherited = {option.name: getattr(inherited, option.name) for option in fields(inherited)}
    if not isinstance(inherited, Mapping):
        return own
    return {**inherited, **{name: _over(inherited.get(name), value) for name, value in own.items()}}
