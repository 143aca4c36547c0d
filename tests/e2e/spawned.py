"""What a spawned rank must be able to import."""

import lightning as L
from torch.utils.data import DataLoader

from lightning_moe import TokenBatch
from tests.kit.rank_trainers import batches


class SpawnData(L.LightningDataModule):
    """The batches of each rank."""

    def train_dataloader(self) -> DataLoader[TokenBatch]:
        assert self.trainer is not None
        rows = batches(self.trainer.global_rank, self.trainer.world_size, 12)
        return DataLoader(rows, batch_size=None)


class FailingSpawnData(SpawnData):
    """The second rank has none."""

    def train_dataloader(self) -> DataLoader[TokenBatch]:
        assert self.trainer is not None
        if self.trainer.global_rank == 1:
            raise ValueError("rank 1 finds no data")
        return super().train_dataloader()
