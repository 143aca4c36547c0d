"""Every name that docs/from-olmo-core.md gives as ours, or Lightning's, or torch's, is one."""

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import lightning
import pytest
import yaml

from lightning_moe import DataConfig, ExpertParallelStrategy, OptimConfig, TransformerConfig
from lightning_moe.cli.command import COMMANDS
from lightning_moe.parallel.transports import TRANSPORTS
from tests.style.source import ROOT

PAGE = ROOT / "docs" / "from-olmo-core.md"
SECTIONS = {"model": TransformerConfig, "data": DataConfig, "optim": OptimConfig}
SIGNATURES = {"strategy": ExpertParallelStrategy, "trainer": lightning.Trainer}


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[1] != "here"]


@cache
def _top_level_keys() -> set[str]:
    keys = yaml.safe_load((ROOT / "conf" / "train.yaml").read_text())
    return {*keys, "hydra.run.dir"} if "run" in keys["hydra"] else set(keys)


def _hint(section: type, path: list[str]) -> object:
    """The type of an option below a config dataclass."""
    hint: object = section
    for name in path:
        kinds = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
        if not kinds or name not in {field.name for field in fields(kinds[0])}:  # type: ignore[arg-type]
            raise LookupError(name)
        hint = get_type_hints(kinds[0])[name]
    return hint


def _choices(hint: object) -> set[object]:
    found: set[object] = set()
    for kind in get_args(hint):
        found |= _choices(kind) if get_args(kind) else {kind}
    return found


def _check_option(key: str, value: str | None) -> None:
    section, *path = key.split(".")
    if section in SECTIONS:
        hint = _hint(SECTIONS[section], path)
    elif section in SIGNATURES and path:
        parameters = inspect.signature(SIGNATURES[section].__init__).parameters  # type: ignore[misc]
        hint = parameters[path[0]].annotation
    elif value is not None and not path:
        assert (ROOT / "conf" / key / f"{value}.yaml").is_file(), f"{key}={value}"
        return
    else:
        assert key in _top_level_keys(), key
        return
    if value is not None:
        named = {choice for choice in _choices(hint) if isinstance(choice, str)}
        named |= set(TRANSPORTS) if key == "strategy.dispatcher" else set()
        assert value in (named or {"true", "false"}), f"{key}={value}"


def _imported(name: str) -> Any:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def check_name(name: str) -> None:
    """Check one name: a command, a name to import, or an option with or without a value."""
    command, *words = name.split()
    if command == "lightning-moe":
        assert words[0] in {command.name for command in COMMANDS}, name
    elif name.split(".", maxsplit=1)[0] in {"lightning_moe", "lightning", "torch"}:
        _imported(name)
    else:
        key, _, value = name.partition("=")
        _check_option(key, value or None)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0][:60])
def test_what_stands_here_for_a_part_of_the_original_exists(row: list[str]) -> None:
    _, here, note = row
    if here == "none":
        assert note, "say why nothing stands for it"
        return
    names = re.findall(r"`([^`]+)`", here)
    assert names, f"neither a name nor none: {here}"
    for name in names:
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.moe.router.tok_k",
        "model.moe.backend=cutlass",
        "strategy.expert_parallels",
        "trainer.max_step",
        "experiment=tiny",
        "ckpt",
        "lightning_moe.nn.Roter",
        "lightning-moe fit",
    ],
)
def test_a_name_that_does_not_exist_is_found_out(name: str) -> None:
    with pytest.raises((AssertionError, AttributeError, LookupError)):
        check_name(name)
