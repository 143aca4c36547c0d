"""Tiny models, batches and Trainers for tests that train, and what a run left behind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import (
    AttentionConfig,
    MoEConfig,
    MoEModule,
    OptimConfig,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
)

VOCAB_SIZE = 11
SEQUENCE_LENGTH = 8
NUM_EXPERTS = 4
LEARNING_RATE = 0.3
GAMMA = 1e-3
NOT_REPEATABLE = "train/tokens_per_second"


def tiny_config(
    *, recompute: str = "none", tie_embeddings: bool = False, **router: object
) -> TransformerConfig:
    """Two MoE layers of width 16; keywords go to the router."""
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        num_layers=2,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(
            num_experts=NUM_EXPERTS,
            hidden_size=12,
            router=RouterConfig(**({"top_k": 2} | router)),
        ),
        # Large weights: every loss, count and gradient is then far from its value for even routing.
        init_std=0.4,
        tie_embeddings=tie_embeddings,
        recompute=recompute,
    )


class SgdModule(MoEModule):
    """Plain gradient descent: a wrong factor on a gradient shows in the weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_module(
    config: TransformerConfig,
    kind: type[MoEModule] = SgdModule,
    optim: OptimConfig | None = None,
    seed: int = 3,
) -> MoEModule:
    """A module whose weights depend on `seed` only."""
    torch.manual_seed(seed)
    return kind(config, optim)


def make_batches(row_lengths: Iterable[Sequence[int]], seed: int = 5) -> list[TokenBatch]:
    """One batch per entry, with one row per number: how many of its first labels count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for lengths in row_lengths:
        shape = (len(lengths), SEQUENCE_LENGTH + 1)
        tokens = torch.randint(VOCAB_SIZE, shape, generator=generator)
        labels_BS = tokens[:, 1:].clone()
        for row, length in enumerate(lengths):
            labels_BS[row, length:] = -100
        batches.append(TokenBatch(ids_BS=tokens[:, :-1].contiguous(), labels_BS=labels_BS))
    return batches


def _as_is(batch: TokenBatch) -> TokenBatch:
    return batch


def make_loader(batches: list[TokenBatch]) -> DataLoader[TokenBatch]:
    """The batches in their order."""
    return DataLoader(batches, batch_size=None, collate_fn=_as_is)


def make_trainer(folder: Path | None = None, **options: object) -> L.Trainer:
    """A quiet Trainer on the CPU that leaves nothing behind but what is asked for, in `folder`."""
    defaults: dict[str, Any] = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(defaults | options))


class History(L.Callback):
    """What was logged at each optimizer step, as numbers."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        metrics = trainer.callback_metrics
        self.steps.append(
            {
                name: value.item()
                for name, value in metrics.items()
                if name.startswith("train/") and name != NOT_REPEATABLE
            }
        )


@dataclass
class Run:
    """What a training left behind."""

    weights: dict[str, Tensor]
    steps: list[dict[str, float]]
    num_steps: int


def run(folder: Path, module: MoEModule, batches: list[TokenBatch], **options: object) -> Run:
    """Fit in float64, unless told otherwise; validation runs before, and after every epoch."""
    history = History()
    callbacks = [history, *options.pop("callbacks", [])]
    trainer = make_trainer(folder, **({"precision": "64-true"} | options), callbacks=callbacks)
    trainer.fit(module, make_loader(batches), make_loader(make_batches([(8, 3)], seed=99)))
    weights = {name: value.clone() for name, value in module.model.state_dict().items()}
    return Run(weights, history.steps, trainer.global_step)


def train_losses(
    batches: list[TokenBatch],
    folder: Path,
    module: L.LightningModule,
    ckpt_path: str | None = None,
    **options: object,
) -> list[float]:
    """`train/loss` of every step; the first batch serves to validate as well."""
    history = History()
    trainer = make_trainer(folder, callbacks=[history], **options)
    trainer.fit(module, make_loader(batches), make_loader(batches[:1]), ckpt_path=ckpt_path)
    return [step["train/loss"] for step in history.steps]


def assert_same(got: Run, expected: Run, *, tolerance: float = 1e-12) -> None:
    """Weights, biases, number of steps, and everything `expected` logged."""
    assert got.num_steps == expected.num_steps
    torch.testing.assert_close(got.weights, expected.weights, rtol=tolerance, atol=tolerance)
    assert len(got.steps) == len(expected.steps)
    for ours, theirs in zip(got.steps, expected.steps, strict=True):
        named = {name: ours[name] for name in theirs}
        torch.testing.assert_close(named, theirs, rtol=tolerance, atol=tolerance)
