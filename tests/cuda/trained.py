"""A few steps of the Trainer on CUDA without a device or on the CPU: numbers logged, and waits of the host."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_moe import (
    AttentionConfig,
    MoEConfig,
    MoEModule,
    OptimConfig,
    RouterConfig,
    SharedExpertConfig,
    TokenBatch,
    TransformerConfig,
)
from tests.cuda.values import Values
from tests.cuda.waits import HostWaits

COMPARED = ("train/loss", "train/balance_loss", "train/grad_norm")
ACCUMULATE, STEPS = 2, 3


def router(**options: Any) -> RouterConfig:
    """Two choices, and both router losses."""
    return RouterConfig(**({"top_k": 2, "lb_loss_weight": 0.01, "z_loss_weight": 1e-3} | options))


def moe(**options: Any) -> dict[str, Any]:
    """Options of a model whose experts have these."""
    defaults = {
        "num_experts": 8,
        "hidden_size": 64,
        "router": router(),
        "shared": SharedExpertConfig(hidden_size=32),
    }
    return {"moe": MoEConfig(**(defaults | options))}


def config(**options: Any) -> TransformerConfig:
    """Two layers with experts."""
    defaults = {
        "vocab_size": 96,
        "d_model": 64,
        "num_layers": 2,
        "attention": AttentionConfig(num_heads=4, num_kv_heads=2, qk_norm="head"),
    }
    return TransformerConfig(**(defaults | moe() | options))


def batches(rank: int, world: int, number: int) -> list[TokenBatch]:
    """Rows of 32 tokens, two per micro-batch over all ranks; some labels are padding."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(number):
        ids = torch.randint(96, (2, 33), generator=generator)[
            rank * 2 // world : (rank + 1) * 2 // world
        ]
        labels = ids[:, 1:].clone()
        labels[:, 28:] = -100
        made.append(TokenBatch(ids_BS=ids[:, :-1].contiguous(), labels_BS=labels))
    return made


@dataclass
class Case:
    """One configuration.

    Attributes:
        model: options of the model.
        trainer: options of the Trainer; one that can be called is called first.
        optim: options of the optimizer.
        on_cpu: what to run there, if it is something else.
        device: number of the CUDA device.
    """

    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    on_cpu: "Case | None" = None
    device: int = 0


@dataclass
class Trained:
    """What a run left behind.

    Attributes:
        metrics: as logged last.
        waits: by name of their place, of the last optimizer step.
        by_batch: number of waits of each micro-batch, in order.
    """

    metrics: dict[str, float]
    waits: dict[str, int]
    by_batch: list[int]


class _PerBatch(L.Callback):
    """The waits of the second step's micro-batches, all of the Trainer's work between two batches included."""

    def __init__(self, waits: HostWaits) -> None:
        self.waits = waits
        self.totals: list[int] = []
        self.by_name: dict[str, int] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == ACCUMULATE:
            self.waits.clear()
        if ACCUMULATE <= batch_idx <= 2 * ACCUMULATE:
            self.totals.append(self.waits.total())
        if batch_idx == 2 * ACCUMULATE:
            self.by_name = self.waits.by_name()


def train(case: Case, accelerator: str, *, rank: int = 0, world: int = 1) -> Trained:
    """Fit three optimizer steps after a look at validation."""
    torch.manual_seed(0)
    if accelerator == "cpu" and case.on_cpu is not None:
        case = case.on_cpu
    given = {key: value() if callable(value) else value for key, value in case.trainer.items()}
    waits = HostWaits("lightning_moe")
    per_batch = _PerBatch(waits)
    options = {
        "accelerator": accelerator,
        "devices": world if world > 1 or accelerator == "cpu" else [case.device],
        "max_steps": STEPS,
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "precision": None if "plugins" in given else "bf16-mixed",
        "num_sanity_val_steps": 1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 100,
        "callbacks": [*given.pop("callbacks", []), per_batch],
    }
    trainer = L.Trainer(**(options | given))
    optim = OptimConfig(**({"lr": 3e-3, "warmup": 2, "schedule": "constant"} | case.optim))
    module = MoEModule(config(**case.model), optim)
    loader = DataLoader(batches(rank, world, STEPS * ACCUMULATE), batch_size=None)
    with Values() if accelerator == "gpu" else nullcontext(), waits:
        trainer.fit(module, loader, loader)
    by_batch = [after - before for before, after in pairwise(per_batch.totals)]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Trained(metrics, per_batch.by_name, by_batch)
