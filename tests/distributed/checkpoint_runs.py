"""Fits that save and load, for tests of checkpoints on ranks that exist already."""

from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn

from lightning_moe import MoEConfig, RouterConfig, TokenBatch
from lightning_moe.nn import MoE
from tests.distributed.lightning_ranks import (
    NUM_EXPERTS,
    VOCAB_SIZE,
    join_lightning,
    loader,
    make_trainer,
)


class OwnModule(L.LightningModule):
    """A user's own: dropout, jitter, and one MoE layer."""

    def __init__(self, *, hidden_size: int = 5, groups: int = 1, **hparams: object) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.groups = groups
        self.embedding = nn.Embedding(VOCAB_SIZE, 6)
        self.dropout = nn.Dropout(0.3)
        router = RouterConfig(top_k=2, jitter_eps=0.1, bias_gamma=1e-2)
        self.moe = MoE(
            6, MoEConfig(num_experts=NUM_EXPERTS, hidden_size=hidden_size, router=router)
        )
        self.head = nn.Linear(6, VOCAB_SIZE)
        self.losses: list[float] = []

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        y_BSD, _ = self.moe(self.dropout(self.embedding(batch.ids_BS)))
        loss = nn.functional.cross_entropy(
            self.head(y_BSD).flatten(0, 1), batch.labels_BS.flatten()
        )
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        y_BSD, _ = self.moe(self.embedding(batch.ids_BS))
        self.log("size", y_BSD.square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        cut = len(parameters) // self.groups
        parts = [parameters[:cut], parameters[cut:]][: self.groups]
        return torch.optim.AdamW([{"params": part} for part in parts], lr=1e-2)


def make_own(seed: int = 0, **options: int | object) -> OwnModule:
    """An `OwnModule` whose weights depend on `seed` only."""
    torch.manual_seed(seed)
    return OwnModule(**options)


def fit(rank: int, world: int, module: L.LightningModule, **options: object) -> L.Trainer:
    """In float32, unless told otherwise."""
    join_lightning(rank, world)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(world, **({"precision": "32-true"} | options))
    trainer.fit(module, loader(rank, world), ckpt_path=ckpt_path)
    return trainer


def message_of(action: Callable[..., object], *args: object, **options: object) -> str:
    """What a call raises, as text that ranks can hand over."""
    try:
        action(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
