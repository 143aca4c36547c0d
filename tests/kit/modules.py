"""Users' own LightningModules around one MoE layer, as the documentation tells them to write it."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_moe import MoEConfig, RouterConfig, StepHooks, TokenBatch
from lightning_moe.nn import MoE, Routing, balance_loss
from tests.kit import rank_trainers
from tests.kit.runs import GAMMA, LEARNING_RATE, NUM_EXPERTS, VOCAB_SIZE


class OwnModule(L.LightningModule):
    """Embedding, MoE, head; the mean cross-entropy of each micro-batch, and no window."""

    def __init__(self, *, bias_gamma: float | None = GAMMA, **router: object) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding = nn.Embedding(VOCAB_SIZE, 6)
        options = RouterConfig(top_k=2, bias_gamma=bias_gamma, **router)
        config = MoEConfig(num_experts=NUM_EXPERTS, hidden_size=5, router=options)
        self.moe = MoE(6, config, init_std=0.5)
        self.head = nn.Linear(6, VOCAB_SIZE)

    def loss_sum(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Routing]:
        """Cross-entropy summed over the labels, their number, and the routing record."""
        valid_BS = batch.labels_BS != -100
        y_BSD, routing = self.moe(self.embedding(batch.ids_BS), valid_BS)
        logits_TV = self.head(y_BSD).flatten(0, 1)
        labels_T = batch.labels_BS.flatten()
        return (
            nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum"),
            valid_BS.sum(),
            routing,
        )

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, _ = self.loss_sum(batch)
        return total / num_tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Recording(StepHooks, OwnModule):
    """Keeps its mean loss and counts the routing."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        self.window.record([routing])
        return total / num_tokens


class Adding(StepHooks, OwnModule):
    """Gives sums to the window."""

    def __init__(self) -> None:
        super().__init__()
        self.window.nominal_tokens = 7

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        return self.window.add(total, num_tokens, [routing])


class Manual(Adding):
    """Manual optimization: one step per `micro_batches` backwards."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.micro_batches = micro_batches

    def training_step(self, batch: TokenBatch, batch_idx: int) -> None:
        total, num_tokens, routing = self.loss_sum(batch)
        self.manual_backward(self.window.add(total, num_tokens, [routing]))
        if (batch_idx + 1) % self.micro_batches == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Scripted(Recording):
    """Hands in given records, one per micro-batch."""

    def __init__(self, records: Sequence[Routing], *, bias_gamma: float | None = GAMMA) -> None:
        super().__init__(bias_gamma=bias_gamma)
        self.records = records

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        loss = self.loss_sum(batch)[0]
        self.window.record([self.records[batch_idx]])
        return loss * 1e-3


class TwoOptimizers(Recording):
    """Two optimizers that both step in every batch."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: TokenBatch, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.moe, self.head)]


class ScriptedTwoOptimizers(TwoOptimizers, Scripted):
    """Both of them."""


class Regression(StepHooks, L.LightningModule):
    """Real numbers in and out, mean losses; with or without a layer of experts, and records that move its bias."""

    def __init__(self, *, with_moe: bool, with_window: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        router = RouterConfig(top_k=2, bias_gamma=1e-2, lb_loss_scope="sequence")
        moe = MoEConfig(num_experts=4, hidden_size=64, router=router)
        self.moe = MoE(16, moe) if with_moe else None
        self.last = nn.Linear(16, 300)
        self.read = nn.Linear(300, 3)
        self.with_window = with_window
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        extra = x.new_zeros(())
        if self.moe is not None:
            y, routing = self.moe(x)
            x = x + y
            with torch.set_grad_enabled(self.moe.router.weight.requires_grad):
                extra = 0.1 * balance_loss([routing], scope="sequence")
            if self.with_window:
                self.window.record([routing])
        loss = self.read(self.last(x).tanh()).square().mean() + extra
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Dropping(L.LightningModule):
    """Dropout and jitter, so that a resumed run needs its random numbers back; any number of optimizer groups."""

    def __init__(self, *, hidden_size: int = 5, groups: int = 1, **hparams: object) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.groups = groups
        self.embedding = nn.Embedding(rank_trainers.VOCAB_SIZE, 6)
        self.dropout = nn.Dropout(0.3)
        router = RouterConfig(top_k=2, jitter_eps=0.1, bias_gamma=1e-2)
        self.moe = MoE(
            6, MoEConfig(num_experts=NUM_EXPERTS, hidden_size=hidden_size, router=router)
        )
        self.head = nn.Linear(6, rank_trainers.VOCAB_SIZE)
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
