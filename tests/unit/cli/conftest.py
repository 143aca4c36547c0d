"""Options composed in this process, without a run folder."""

from collections.abc import Callable, Iterator

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_moe.cli.groups import find_conf, register_groups

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_train() -> Iterator[Compose]:
    register_groups("train")
    with initialize_config_dir(str(find_conf()), version_base="1.3"):
        yield lambda *overrides: compose("train", overrides=list(overrides))
