"""A user's own Hydra script, run by tests as processes; writes what each rank was given."""

import json
import random
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy
from tests.kit.rank_trainers import Module, batches, make_module, rank_trainer

OmegaConf.register_new_resolver(
    "draw", lambda: random.SystemRandom().random(), use_cache=True, replace=True
)


class Told(L.Callback):
    """Writes what each rank of a run from the command line was given."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        told = {
            "lr": pl_module.hparams["optim"]["lr"],
            "folder": str(folder),
            "world": trainer.world_size,
        }
        (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))


class Drawn(Module):
    """Whose learning rate is an option."""

    lr = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@hydra.main(version_base=None, config_path="hydra_conf", config_name="main")
def main(options: DictConfig) -> None:
    torch.set_num_threads(1)
    folder = Path(HydraConfig.get().runtime.output_dir)
    trainer = rank_trainer(2, ExpertParallelStrategy(2), max_steps=2, default_root_dir=folder)
    module = make_module(kind=Drawn)
    module.lr = options.lr
    trainer.fit(module.double(), DataLoader(batches(trainer.global_rank, 2), batch_size=None))
    result = {"lr": options.lr, "drawn": options.drawn, "name": options.nested.name}
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
