"""Two processes share the experts of every layer; losses and weights are those of one process."""

import lightning as L

from lightning_moe import (
    ExpertParallelStrategy,
    MoEModule,
    OptimConfig,
    TokenDataModule,
    TransformerConfig,
)
from lightning_moe.callbacks import ExpertLoadMonitor

if __name__ == "__main__":  # the script runs once per rank
    L.seed_everything(0)
    module = MoEModule(TransformerConfig.preset("tiny"), OptimConfig(lr=3e-3, warmup=5))
    data = TokenDataModule.from_text(__file__, sequence_length=32, batch_size=2)
    trainer = L.Trainer(
        strategy=ExpertParallelStrategy(expert_parallel=2),
        devices=2,
        accelerator="cpu",
        max_steps=10,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ExpertLoadMonitor(write_files=False)],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        default_root_dir="runs/expert_parallel",
    )
    trainer.fit(module, data)

    experts = module.moe_layers[0].experts
    print(f"rank {trainer.global_rank} holds experts {list(experts.expert_ids)}")
    trainer.save_checkpoint("runs/expert_parallel/two_ranks.ckpt")  # a folder; loads on any ranks
    if trainer.is_global_zero:
        print("loss:", round(trainer.callback_metrics["train/loss"].item(), 3))
