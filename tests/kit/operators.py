"""Looking at operators while they run, beneath autograd."""

from abc import ABC, abstractmethod
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode, ABC):
    """Shows every operator to `saw` as soon as it has run."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.saw(func, args, kwargs, result)
        return result

    @abstractmethod
    def saw(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """What to note of it."""


class Calls(Watch):
    """Counts how often an operator really runs, by the beginning of its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def saw(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self.count += str(operator).startswith(self.name)
