"""The tool that lists the waits of a training script."""

from pathlib import Path

import pytest

from tests.cuda.syncs import count

SCRIPT = """
import lightning as L
import torch

from lightning_moe import MoEConfig, RouterConfig, StepWindow, close_window
from lightning_moe.nn import MoE, balance_loss


class Own(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.moe = MoE(8, MoEConfig(num_experts=4, hidden_size=16, router=RouterConfig(top_k=2)))

    def training_step(self, batch, batch_idx):
        y, routing = self.moe(batch)
        self.seen = y.mean().item()  # one wait
        return y.square().mean() + 0.01 * balance_loss([routing])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = L.Trainer(
    accelerator="gpu", devices=1, max_epochs=1, accumulate_grad_batches=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed",
)
trainer.fit(Own(), torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4))
"""


@pytest.mark.filterwarnings("ignore")
def test_a_wait_in_a_users_step_is_listed_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    title, *lines = count(str(script), [])
    assert title.endswith("waits of the host in one optimizer step of 2 micro-batches")
    number = 1 + SCRIPT.splitlines().index("        self.seen = y.mean().item()  # one wait")
    assert lines[0].strip() == f"2  {script}:{number} in training_step"
