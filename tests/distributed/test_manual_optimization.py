"""Manual optimisation on ranks does what it does on one process."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from tests.kit.rank_runs import fit, parallel, whole_weights
from tests.kit.ranks import run_ranks

STEPS = 4


class Manual(L.LightningModule):
    """Two halves with an optimizer each; subclasses say how they take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(6, 700)
        self.back = nn.Linear(700, 16)
        router = RouterConfig(top_k=2)
        self.moe = MoE(16, MoEConfig(num_experts=4, hidden_size=64, router=router))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.back(self.first(x).tanh())
        return self.last(x + self.moe(x)[0])

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def configure_optimizers(self) -> Any:
        halves = (
            [*self.first.parameters(), *self.back.parameters()],
            [
                *self.moe.parameters(),
                *self.last.parameters(),
            ],
        )
        return [torch.optim.AdamW(half, lr=1e-2) for half in halves]


class Accumulating(Manual):
    """Three micro-batches, of which the last one synchronises."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        both = self.optimizers()
        micro_batches = batch.unbind(1)
        for i, micro in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with both[0].toggle_model(sync_grad=last):
                self.untoggle_optimizer(both[0])
                self.manual_backward(self.loss(micro))
        self.clip_gradients(both[0], gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


class Alternating(Manual):
    """Each half takes its turn while the other is toggled off; gradients are cleared after the step only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, micro in zip(self.optimizers(), batch.unbind(1), strict=False):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(micro))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class ChangingItsMind(Manual):
    """Throws away what two micro-batches without synchronisation have accumulated."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        both = self.optimizers()
        first, second, third = batch.unbind(1)
        for micro in (first, second):
            with both[1].toggle_model(sync_grad=False):
                self.manual_backward(7 * self.loss(micro))
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(self.loss(third))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


class SeveralBackwards(Manual):
    """Every backward of a step synchronises."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        both = self.optimizers()
        for micro in batch.unbind(1):
            self.manual_backward(self.loss(micro))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def _train(
    rank: int, world: int, kind: type[Manual], ep: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind().double()
    generator = torch.Generator().manual_seed(4)
    data = [torch.randn(4, 3, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    own = 4 // world
    strategy = parallel(ep, **options) if world > 1 else "auto"
    batches = [batch[rank * own : (rank + 1) * own] for batch in data]
    fit(rank, world, module, batches, strategy=strategy)
    return whole_weights(module, strategy)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("kind", [Accumulating, Alternating, ChangingItsMind, SeveralBackwards])
def test_manual_steps_give_the_weights_of_one_process(
    kind: type[Manual], ep: int, distributed: bool
) -> None:
    (weights,) = run_ranks(_train, 1, kind, 1, {}, timeout_s=120)
    options = {"distributed_optimizer": distributed}
    for found in run_ranks(_train, 2, kind, ep, options, timeout_s=120):
        for name, expected in weights.items():
            torch.testing.assert_close(
                found[name], expected, rtol=0.0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
