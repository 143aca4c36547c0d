"""Shared by callbacks that diagnose routing: routers that trace for a while, and errors that end no training."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_moe.nn import MoE


class TraceSwitch:
    """Switches tracing of routers on and off; routers whose tracing was on before stay on."""

    def __init__(self, layers: Sequence[MoE] = ()) -> None:
        self._routers = [layer.router for layer in layers]
        self._switched = self._routers[:0]

    def on(self) -> None:
        """Trace from the next forward on."""
        for router in self._routers:
            if not router.trace:
                router.trace = True
                self._switched.append(router)

    def off(self) -> None:
        """Turn off what `on` turned on."""
        for router in self._switched:
            router.trace = False
        self._switched = []


@contextmanager
def not_fatal(what: str) -> Iterator[None]:
    """Turns an error into a warning: a diagnosis that fails must neither end training nor hide why it ended."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what} failed, training isn't affected: {error!r}", stacklevel=3)
