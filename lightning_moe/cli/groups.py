"""Config groups that come from the dataclasses, so that names and defaults are written once, in Python."""

from pathlib import Path
from textwrap import fill
from typing import Any, Final, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from lightning_moe.config import PRESETS, OptimConfig, TransformerConfig, to_mapping
from lightning_moe.config.data import DataConfig

_PROVIDER: Final = "lightning_moe"


def register_groups(command: str) -> None:
    """Offer groups to Hydra: `model`, one option per preset, `optim` and `data`.

    For `evaluate` there is `data=as_trained`, which leaves every key to the checkpoint, and no model.
    """
    data = to_mapping(DataConfig())
    if command == "evaluate":
        _store("data", "default", data)
        _store("data", "as_trained", dict.fromkeys(data, MISSING))
        return
    _store("data", "default", {**data, "vocab_size": "${model.vocab_size}"})
    for name in PRESETS:
        _store("model", name, to_mapping(TransformerConfig.preset(name)))
    _store("optim", "default", to_mapping(OptimConfig()))


def _store(group: str, name: str, options: object) -> None:
    # The store also takes plain mappings; its signature says Any, which strict typing lets through as object only.
    ConfigStore.instance().store(
        name=name, node=cast("Any", options), group=group, provider=_PROVIDER
    )


def list_groups(command: str, conf: Path) -> str:
    """The groups of a command with their options, one a line, for its help."""
    names = {"strategy": _files(conf, "strategy"), "logger": _files(conf, "logger")}
    if command == "evaluate":
        names = {"data": ["as_trained", "default"], **names}
    else:
        of_train = {name: _files(conf, name) for name in ("experiment", "trainer", "callbacks")}
        names = {"model": list(PRESETS), **of_train, **names}
    return "\n".join(
        fill(
            f"{name}: {', '.join(options)}",
            width=100,
            initial_indent="  ",
            subsequent_indent="    ",
        )
        for name, options in names.items()
    )


def _files(conf: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))
