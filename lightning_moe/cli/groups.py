"""The options that Hydra offers: the folder `conf`, and groups that come from the dataclasses."""

from pathlib import Path
from textwrap import fill
from typing import Any, Final, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from lightning_moe.config import PRESETS, OptimConfig, TransformerConfig, to_mapping
from lightning_moe.config.data import DataConfig

_PROVIDER: Final = "lightning_moe"
_PACKAGE: Final = Path(__file__).parents[1]


def find_conf(package: Path = _PACKAGE) -> Path:
    """The folder `conf`: inside the installed package, or beside it in a clone.

    Raises:
        FileNotFoundError: if there is none.
    """
    candidates = (package / "conf", package.parent / "conf")
    for folder in candidates:
        if (folder / "train.yaml").is_file():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise FileNotFoundError(
        f"no folder conf with a train.yaml at {places}; install lightning-moe again"
    )


def register_groups(command: str) -> None:
    """Offer groups to Hydra: `model`, one option per preset, `optim` and `data`. Names and defaults are Python's.

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


def group_options(command: str, conf: Path) -> list[tuple[str, list[str]]]:
    """The groups of a command with the names of their options."""
    names = ["strategy", "logger"]
    first = ("data", ["as_trained", "default"])
    if command == "train":
        names, first = ["experiment", "trainer", "callbacks", *names], ("model", list(PRESETS))
    return [first, *((name, _files(conf, name)) for name in names)]


def list_groups(command: str, conf: Path) -> str:
    """The groups of a command with their options, one a line, for its help."""
    return "\n".join(
        fill(
            f"{name}: {', '.join(options)}",
            width=100,
            initial_indent="  ",
            subsequent_indent="    ",
        )
        for name, options in group_options(command, conf)
    )


def _files(conf: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))
