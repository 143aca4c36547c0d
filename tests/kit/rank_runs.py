"""The Trainer inside of ranks that `run_ranks` has connected."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe import (
    AttentionConfig,
    ExpertParallelStrategy,
    MoEConfig,
    MoEModule,
    RouterConfig,
    SharedExpertConfig,
    TokenBatch,
    TransformerConfig,
)
from tests.kit.rank_trainers import join_lightning, rank_trainer

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def config(*, num_experts: int = 4, recompute: str = "none", **router: Any) -> Any:
    """Two layers, 16 wide: attention weights stay whole, embeddings and experts are split over replicas."""
    defaults = {"top_k": 2, "normalize_expert_weights": 1.0, "lb_loss_weight": 0.1}
    defaults |= {"lb_loss_scope": "sequence", "z_loss_weight": 1e-2, "orth_loss_weight": 0.1}
    defaults |= {"bias_gamma": 1e-2}
    moe = MoEConfig(
        num_experts=num_experts,
        hidden_size=64,
        router=RouterConfig(**{**defaults, **router}),
        shared=SharedExpertConfig(hidden_size=8),
    )
    return TransformerConfig(
        vocab_size=256,
        d_model=16,
        num_layers=2,
        attention=AttentionConfig(num_heads=2),
        moe=moe,
        recompute=recompute,
    )


class Recorded(MoEModule):
    """A plain optimizer, and the loss and gradient norm of every step.

    Attributes:
        losses, norms: one per optimizer step.
    """

    def __init__(self, model: Any, optimizer: Callable[..., Any]) -> None:
        super().__init__(model)
        self.make_optimizer = optimizer
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            metrics = self.trainer.callback_metrics
            self.losses.append(metrics["train/loss"].item())
            self.norms.append(metrics["train/grad_norm"].item())


def batches(
    rank: int, world: int, *, steps: int, accumulate: int = 1, sequences: int = 8
) -> list[TokenBatch]:
    """This rank's part of `sequences` ragged sequences per step, split into `accumulate` micro-batches."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(steps):
        ids = torch.randint(0, 256, (sequences, 8), generator=generator)
        labels = ids[:, 1:].clone()
        for row in range(sequences):
            labels[row, 7 - row % 7 :] = -100
        micro, own = sequences // accumulate, sequences // accumulate // world
        for start in range(0, sequences, micro):
            rows = slice(start + rank * own, start + rank * own + own)
            parts.append(
                TokenBatch(ids_BS=ids[rows, :-1].contiguous(), labels_BS=labels[rows].contiguous())
            )
    return parts


def fit(
    rank: int,
    world: int,
    module: L.LightningModule,
    data: Sequence[Any] | IterableDataset[Any],
    *,
    strategy: L.pytorch.strategies.Strategy | str,
    **options: Any,
) -> L.Trainer:
    """Fit over batches that are this rank's already, or a stream of them; on one rank any strategy will do."""
    join_lightning(rank, world)
    defaults = {"max_epochs": 1, "max_steps": -1, "gradient_clip_val": None}
    trainer = rank_trainer(world, strategy, **(defaults | options))
    dataset = data if isinstance(data, IterableDataset) else list(data)
    trainer.fit(module, DataLoader(dataset, batch_size=None))
    return trainer


def whole_weights(module: nn.Module, strategy: Any) -> dict[str, Tensor]:
    """All parameters and buffers with all experts, after a check that replicas are equal bit for bit."""
    mesh, found = getattr(strategy, "mesh", None), {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        own = tensor.detach().clone()
        if mesh is None or mesh.shape.world == 1:
            found[name] = own
            continue
        everyone = [torch.empty_like(own) for _ in range(mesh.shape.world)]
        dist.all_gather(everyone, own.contiguous())
        stride = mesh.shape.ep if ".experts." in name else 1
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[rank % stride]), f"replicas differ: {name}"
        found[name] = torch.cat(everyone[:stride]) if stride > 1 else own
    return found


def parallel(ep: int | str = "auto", **options: Any) -> ExpertParallelStrategy:
    """The strategy, patient enough for a busy machine."""
    return ExpertParallelStrategy(ep, timeout=120.0, **options)
