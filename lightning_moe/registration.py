"""The strategy's names in Lightning's registry, from when both Lightning and this package are imported.

Lightning has no entry point for strategies, so `import lightning_moe` must register the names. It must not import
Lightning for that: this takes seconds, which a command's `--help`, or a tool that reads configs, would wait for.
Where Lightning isn't imported yet, the names are registered right after Lightning's own.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

NAMES: Final = {
    "expert_parallel": "popen",
    "expert_parallel_spawn": "spawn",
    "expert_parallel_fork": "fork",
    "expert_parallel_notebook": "fork",
}
_REGISTRY_MODULE: Final = "lightning.pytorch.strategies"


def register_strategies() -> None:
    """Let `Trainer(strategy="expert_parallel")` and its `_spawn`, `_fork` and `_notebook` variants work.

    Importing `lightning_moe` calls this. Calling it again is harmless.
    """
    module = sys.modules.get(_REGISTRY_MODULE)
    if module is not None:
        _register(module)
    elif not any(isinstance(finder, _AwaitLightning) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AwaitLightning())


def _register(module: ModuleType) -> None:
    for name, start_method in NAMES.items():
        if name not in module.StrategyRegistry:
            module.StrategyRegistry.register(
                name,
                _build,
                description="experts spread over ranks, dense parameters replicated, optimizer state sharded",
                start_method=start_method,
            )


def _build(**options: Any) -> object:
    # Only now: its modules need Lightning to be imported to the end.
    return import_module("lightning_moe.strategy").ExpertParallelStrategy(**options)


class _AwaitLightning(MetaPathFinder):
    """Steps in once, when Lightning's strategies are imported."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What all other finders give, with a loader that registers."""
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module as its own loader does, then registers the names in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves no trace in the module."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)
