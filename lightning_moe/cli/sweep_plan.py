"""Which jobs a multirun was to run, whether it came to them or not."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def planned_jobs(folder: Path) -> list[list[str]]:
    """The overrides of every job of the sweep in `folder`, in order.

    Empty where that can't be known beforehand: another sweeper than Hydra's basic one chooses as it goes, and `glob`
    needs the configs of that day.
    """
    try:
        plan = yaml.safe_load((folder / "multirun.yaml").read_text(encoding="utf-8"))
        hydra: Mapping[str, Mapping[str, object]] = plan["hydra"]
        sweeper, task = hydra["sweeper"], hydra["overrides"]["task"]
    except (yaml.YAMLError, KeyError, TypeError):
        return []
    params = sweeper.get("params") or {}
    if not str(sweeper.get("_target_")).endswith(".BasicSweeper"):
        return []
    assert isinstance(params, Mapping)
    assert isinstance(task, list)
    try:
        return _product([*(f"{key}={value}" for key, value in params.items()), *task])
    except HydraException:
        return []


def _product(words: list[str]) -> list[list[str]]:
    """As the basic sweeper has it: the last word about a key counts, and later keys vary fastest."""
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(words):
        key = override.get_key_element()
        values = (
            override.sweep_string_iterator()
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
        )
        choices[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*choices.values())]
