"""How token copies travel to the ranks of their experts: a file per transport, with its options, and the registry."""

from dataclasses import fields
from typing import Final

from lightning_moe.config.checks import given
from lightning_moe.config.names import OptionNames
from lightning_moe.parallel.transports.all_to_all import AllToAllDispatch, AllToAllDispatcher
from lightning_moe.parallel.transports.static import StaticDispatch, StaticDispatcher
from lightning_moe.parallel.transports.transport import LargerBatches, Transport

# By their names in `strategy.dispatcher`. A further transport is one file and one line here.
TRANSPORTS: Final[dict[str, type[Transport]]] = {
    "all_to_all": AllToAllDispatch,
    "static": StaticDispatch,
}
_NAMES: Final = OptionNames("strategy.dispatcher", tuple(TRANSPORTS))

__all__ = [
    "TRANSPORTS",
    "AllToAllDispatch",
    "AllToAllDispatcher",
    "LargerBatches",
    "StaticDispatch",
    "StaticDispatcher",
    "Transport",
    "make_transport",
    "register_transport",
]


def register_transport(name: str, options: type[Transport]) -> None:
    """Let `strategy.dispatcher=name` mean the transport that has these options.

    Every process registers it before it makes a strategy with that name.

    Raises:
        ValueError: if the name is taken.
    """
    _NAMES.add(name)
    TRANSPORTS[name] = options


def make_transport(dispatcher: str | Transport, **options: object) -> Transport:
    """The transport that these options of the strategy ask for.

    Args:
        dispatcher: a name in `TRANSPORTS`, or the options themselves.
        options: of the transport with that name; None leaves one at the transport's default.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for an unknown name, a value that can't work, an option that the transport doesn't have, and one
            beside a dataclass.
    """
    options = given(**options)
    if isinstance(dispatcher, Transport):
        for name, value in options.items():
            raise ValueError(
                f"strategy.{name}={value} and strategy.dispatcher={dispatcher} both give options of the transport; "
                f"give {name} to {type(dispatcher).__name__}, or choose strategy.dispatcher by name"
            )
        return dispatcher
    _NAMES.check(dispatcher)
    own = _options_of(TRANSPORTS[dispatcher])
    for name, value in options.items():
        if name not in own:
            others = [other for other, kind in TRANSPORTS.items() if name in _options_of(kind)]
            raise ValueError(
                f"strategy.{name}={value} has no effect with strategy.dispatcher={dispatcher}, which has "
                f"{', '.join(own) or 'no options'}; unset it, or choose {' or '.join(others)}"
            )
    return TRANSPORTS[dispatcher](**options)


def _options_of(kind: type[Transport]) -> list[str]:
    return [field.name for field in fields(kind)]
