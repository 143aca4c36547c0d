"""A user's own LightningModule around one MoE layer, for the Trainer on several ranks."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_moe import MoEConfig, RouterConfig, StepWindow
from lightning_moe.nn import MoE, balance_loss


class OwnModule(L.LightningModule):
    """A user's module: MoE layer inside, mean losses, no `MoEModule`; `window` feeds the bias correction."""

    def __init__(self, *, with_moe: bool, with_window: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        router = RouterConfig(top_k=2, bias_gamma=1e-2, lb_loss_scope="sequence")
        moe = MoEConfig(num_experts=4, hidden_size=64, router=router)
        self.moe = MoE(16, moe) if with_moe else None
        self.last = nn.Linear(16, 300)
        self.read = nn.Linear(300, 3)
        if with_window:
            self.window = StepWindow()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        extra = x.new_zeros(())
        if self.moe is not None:
            y, routing = self.moe(x)
            x = x + y
            with torch.set_grad_enabled(self.moe.router.weight.requires_grad):
                extra = 0.1 * balance_loss([routing], scope="sequence")
            if hasattr(self, "window"):
                self.window.record([routing])
        loss = self.read(self.last(x).tanh()).square().mean() + extra
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
