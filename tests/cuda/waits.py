"""Where the host waits for the device, by line of Python."""

import ctypes
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

_LISTENER: Final = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
# Frames that belong to whoever watches, and to the machinery of operators.
_MACHINERY: Final = (
    *(str(Path(__file__).parent / f"{name}.py") for name in ("waits", "values", "syncs")),
    "torch/_ops.py",
    "torch/utils/_python_dispatch.py",
    "torch/_library/custom_ops.py",
    "torch/_library/autograd.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_compile.py",
    "jaxtyping/_decorator.py",
)
_LIBRARIES: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))


def is_loaded() -> bool:
    """Whether this process has the runtime that has no device."""
    return hasattr(ctypes.CDLL(None), "runtime_listen")


def launches() -> int:
    """Kernels launched so far; those of cuBLAS aren't among them."""
    return ctypes.c_long.in_dll(ctypes.CDLL(None), "runtime_launches").value


_listening: list[Callable[[str, int], None]] = []
_everyone = _LISTENER(
    lambda what, which: [hear(what.decode(), which) for hear in [*_listening]] and None
)


def listen(hear: Callable[[str, int], None]) -> None:
    """Have `hear` called with the name of every wait, and with every graph that is launched."""
    _listening.append(hear)
    ctypes.CDLL(None).runtime_listen(_everyone)


def leave(hear: Callable[[str, int], None]) -> None:
    """No longer."""
    _listening.remove(hear)
    if not _listening:
        ctypes.CDLL(None).runtime_listen(ctypes.cast(None, _LISTENER))


@dataclass(frozen=True, slots=True)
class Wait:
    """One place where the host waits.

    Attributes:
        file, line, function: the innermost frame of the code that is watched, or of any if there is none.
        inner: the innermost frame of all, as `file:line`.
    """

    file: str
    line: int
    function: str
    inner: str

    @property
    def name(self) -> str:
        """Short, and the same after lines were added above."""
        return f"{'/'.join(self.file.split('/')[-2:])}:{self.function}"

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}"
        return where if self.inner == f"{self.file}:{self.line}" else f"{where} <- {self.inner}"


class HostWaits:
    """Counts waits by place.

    Args:
        package: folder whose frames are watched; without it all that isn't Python's or an installed package's.
    """

    def __init__(self, package: str | None = None) -> None:
        self._found: Counter[Wait] = Counter()
        self._copy: Wait | None = None
        self._package = package

    def __enter__(self) -> "HostWaits":
        listen(self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave(self._hear)

    def _hear(self, what: str, which: int) -> None:
        if what == "cudaGraphLaunch":
            return
        wait = self._place(what)
        if what == "copy to pageable memory" and self._copy is None:
            self._copy = wait
            return
        # A copy that must be complete is two calls: it, and waiting for it.
        self._end_copy(unless=wait)
        self._found[wait] += 1

    def _end_copy(self, unless: Wait | None = None) -> None:
        if self._copy not in (None, unless):
            self._found[self._copy] += 1
        self._copy = None

    def _place(self, what: str) -> Wait:
        stack = [f for f in traceback.extract_stack() if not f.filename.endswith(_MACHINERY)]
        if not stack:  # a thread of autograd, in no Python code
            return Wait("", 0, what, "")
        at = ([frame for frame in stack if self._watches(frame.filename)] or stack)[-1]
        inner = f"{stack[-1].filename}:{stack[-1].lineno}"
        return Wait(at.filename, at.lineno or 0, at.name, inner)

    def _watches(self, filename: str) -> bool:
        if self._package is not None:
            return f"/{self._package}/" in filename
        return not filename.startswith((*_LIBRARIES, "<"))

    @property
    def found(self) -> Counter[Wait]:
        """Number of waits by place, since the start or the last `clear`."""
        self._end_copy()
        return self._found

    def by_name(self) -> dict[str, int]:
        """The numbers by `Wait.name`."""
        numbers: Counter[str] = Counter()
        for wait, number in self.found.items():
            numbers[wait.name] += number
        return dict(numbers)

    def total(self) -> int:
        """All of them."""
        return sum(self.found.values())

    def clear(self) -> None:
        """Start anew."""
        self._copy = None
        self._found.clear()
