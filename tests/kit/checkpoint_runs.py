"""Fits that save and load, for tests of checkpoints on ranks that exist already."""

from collections.abc import Callable

import lightning as L
import torch

from tests.kit.modules import Dropping
from tests.kit.rank_trainers import (
    join_lightning,
    loader,
    rank_trainer,
)


def make_own(seed: int = 0, **options: int | object) -> Dropping:
    """A `Dropping` whose weights depend on `seed` only."""
    torch.manual_seed(seed)
    return Dropping(**options)


def fit(rank: int, world: int, module: L.LightningModule, **options: object) -> L.Trainer:
    """In float32, unless told otherwise."""
    join_lightning(rank, world)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = rank_trainer(world, **({"precision": "32-true"} | options))
    trainer.fit(module, loader(rank, world), ckpt_path=ckpt_path)
    return trainer


def message_of(action: Callable[..., object], *args: object, **options: object) -> str:
    """What a call raises, as text that ranks can hand over."""
    try:
        action(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
