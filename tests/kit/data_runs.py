"""A trivial module and a Trainer that record which rows were trained on."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from lightning_moe.data import TokenBatch, TokenDataModule
from tests.kit.runs import make_trainer

Rows = tuple[tuple[int, ...], ...]


class Recorder(L.LightningModule):
    """Trains one number and remembers the inputs of every training and validation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[Rows] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: TokenBatch) -> Tensor:
        self.trained.append(tuple(map(tuple, batch.ids_BS.tolist())))
        return self.weight * batch.ids_BS.sum()

    def validation_step(self, batch: TokenBatch) -> None:
        self.validated.append(batch.labels_BS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Saves a checkpoint called `<hook>-<number of trained batches>` whenever `hook` is called."""

    def __init__(self, hook: str, folder: Path) -> None:
        self.folder = folder
        setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: L.Trainer, module: Recorder, *_: object) -> None:
            if not trainer.sanity_checking:
                trainer.save_checkpoint(self.folder / f"{hook}-{len(module.trained)}.ckpt")

        return save


def data_trainer(folder: Path, **options: object) -> L.Trainer:
    """As many epochs as Lightning would run, and validation when it is due only."""
    return make_trainer(folder, **({"max_epochs": None, "num_sanity_val_steps": 0} | options))


def make_data(folder: Path, num_rows: int, **options: object) -> TokenDataModule:
    """Rows of 3 bytes, all different, two per batch."""
    path = folder / "train.txt"
    path.write_bytes(bytes(range(3 * num_rows)))
    (folder / "val.txt").write_bytes(b"validate")
    return TokenDataModule.from_text(
        str(path),
        val_paths=(str(folder / "val.txt"),),
        **({"sequence_length": 3, "batch_size": 2} | options),
    )
