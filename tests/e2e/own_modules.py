"""Users' own LightningModules around one MoE layer, as the documentation tells them to write it."""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn

from lightning_moe import MoEConfig, RouterConfig, StepWindow, TokenBatch
from lightning_moe.nn import MoE, Routing
from tests.e2e.runs import GAMMA, LEARNING_RATE, NUM_EXPERTS, VOCAB_SIZE


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


class Recording(OwnModule):
    """Keeps its mean loss and counts the routing."""

    def __init__(self, *, bias_gamma: float | None = GAMMA) -> None:
        super().__init__(bias_gamma=bias_gamma)
        self.window = StepWindow()

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        self.window.record([routing])
        return total / num_tokens


class Adding(OwnModule):
    """Gives sums to the window; a callback closes it."""

    def __init__(self, nominal_tokens: int = 7) -> None:
        super().__init__()
        self.window = StepWindow(nominal_tokens)

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
