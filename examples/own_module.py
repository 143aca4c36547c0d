"""The MoE layer in a LightningModule of your own: a classifier of points on a spiral."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe import MoEConfig, RouterConfig, StepHooks
from lightning_moe.callbacks import ExpertLoadMonitor, RouterBiasCorrection
from lightning_moe.nn import MoE, balance_loss


class SpiralClassifier(StepHooks, L.LightningModule):
    """Two inputs, two classes, one MoE layer; callbacks find the counts of a step through the hooks."""

    def __init__(self) -> None:
        super().__init__()
        router = RouterConfig(top_k=2, normalize_expert_weights=1.0, bias_gamma=1e-3)
        self.first, self.last = nn.Linear(2, 32), nn.Linear(32, 2)
        self.moe = MoE(32, MoEConfig(num_experts=4, hidden_size=64, router=router))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean loss as usual; the routing record goes to the window."""
        x, labels = batch
        hidden = self.first(x)
        y, routing = self.moe(hidden)
        self.window.record([routing])
        loss = nn.functional.cross_entropy(self.last(hidden + y), labels)
        self.log("train/ce", loss, prog_bar=True)
        return loss + 0.01 * balance_loss([routing])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


L.seed_everything(0)
radius = torch.rand(2048, 1) * 3
label = torch.randint(2, (2048,))
angle = 3 * radius.squeeze(1) + torch.pi * label
points = radius * torch.stack((angle.cos(), angle.sin()), dim=1)
data = DataLoader(TensorDataset(points, label), batch_size=256, shuffle=True)

module = SpiralClassifier()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=30,
    callbacks=[RouterBiasCorrection(), ExpertLoadMonitor(write_files=False)],
    enable_checkpointing=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(module, data)
print("loss:", round(trainer.callback_metrics["train/ce"].item(), 3))
print(
    "busiest expert / mean:", round(trainer.callback_metrics["train/load_max_over_mean"].item(), 2)
)
print("expert bias:", [round(b, 3) for b in module.moe.router.score_bias.tolist()])
