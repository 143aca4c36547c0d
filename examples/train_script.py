"""Train a small MoE language model from your own script: on your text, or on Python's own sources."""

import sys

import lightning as L

from lightning_moe import MoEModule, OptimConfig, TokenDataModule, TransformerConfig
from lightning_moe.callbacks import ExpertLoadMonitor, LossCurve

L.seed_everything(0)
module = MoEModule(TransformerConfig.preset("tiny"), OptimConfig(lr=3e-3, warmup=10))
data = TokenDataModule.from_text(*(sys.argv[1:] or [__file__]), sequence_length=64, batch_size=4)
trainer = L.Trainer(
    accelerator="cpu",
    max_steps=20,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    log_every_n_steps=5,
    callbacks=[ExpertLoadMonitor(), LossCurve()],
    enable_model_summary=False,
    default_root_dir="runs/train_script",
)
trainer.fit(module, data)

results = trainer.validate(module, data)[0]
print(
    f"validation: {results['val/bits_per_byte']:.2f} bits per byte after {trainer.global_step} steps"
)
print("pictures and checkpoint:", trainer.default_root_dir)
