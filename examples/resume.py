"""Stop in the middle of an epoch, resume, and end with the very weights of an uninterrupted run."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_moe import MoEModule, TokenDataModule, TransformerConfig

FOLDER = Path("runs/resume")


def train(max_steps: int, ckpt_path: Path | None = None) -> torch.Tensor:
    """All weights after `max_steps`, as one vector."""
    L.seed_everything(0)
    module = MoEModule(TransformerConfig.preset("tiny"))
    data = TokenDataModule.from_text(__file__, sequence_length=32, batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        callbacks=[ModelCheckpoint(FOLDER, filename="{step}", every_n_train_steps=3)],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


straight = train(max_steps=6)
train(max_steps=3)
resumed = train(max_steps=6, ckpt_path=FOLDER / "step=3.ckpt")
print("bit for bit equal:", torch.equal(straight, resumed))
