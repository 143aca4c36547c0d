"""What a checkpoint keeps besides tensors can be loaded without running code."""

import io
import random
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from lightning_moe.checkpoint.rank_state import plain, rank_state, restore_rng


def test_containers_paths_and_numpy_numbers_become_plain() -> None:
    value = {
        "conf": OmegaConf.create({"a": 1, "b": "${a}", "c": [1, {"d": 2}]}),
        "path": Path("x") / "y",
        "number": np.float32(0.5),
        "pair": (1, "two"),
        "kind": dict,
    }
    expected = {
        "conf": {"a": 1, "b": 1, "c": [1, {"d": 2}]},
        "path": "x/y",
        "number": 0.5,
        "pair": (1, "two"),
    }
    assert plain(value) == expected


def _draw() -> tuple[list[float], float, float]:
    return torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: S311 - it is what users call


def test_all_three_generators_go_on_where_they_were() -> None:
    file = io.BytesIO()
    torch.save(rank_state({}), file)
    expected = _draw()
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True)["rng"])
    assert _draw() == expected
