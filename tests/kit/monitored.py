"""Fits under the load monitor, of modules whose routing is given."""

from pathlib import Path

import lightning as L

from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.nn import Routing
from tests.kit.modules import Scripted
from tests.kit.records import routing_record
from tests.kit.runs import History, make_batches, make_loader, make_trainer

HISTORY = "routing_history.npz"


def _record(counts: list[int], kept: list[int], scores: list[float], lost: int) -> Routing:
    return routing_record(counts, kept=kept, scores=scores, lost=lost, top_k=2)


# Of five steps; the third is even.
RECORDS = [
    _record([4, 0, 0, 4], [3, 0, 0, 3], [1.0, 1.0, 1.0, 1.0], 1),
    _record([0, 6, 2, 0], [0, 3, 2, 0], [0.5, 2.5, 1.0, 0.0], 0),
    _record([2, 2, 2, 2], [2, 2, 2, 2], [4.0, 0.0, 0.0, 0.0], 0),
    _record([8, 0, 0, 0], [4, 0, 0, 0], [4.0, 0.0, 0.0, 0.0], 2),
    _record([1, 1, 3, 3], [1, 1, 3, 3], [1.0, 1.0, 1.0, 1.0], 0),
]


class Failing(Scripted):
    """In the fourth step."""

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 3:
            raise OSError("the disk is full")


def fit(folder: Path, module: L.LightningModule, num_batches: int, **options: object) -> History:
    """One epoch of as many batches."""
    history = History()
    callbacks = [history, *options.pop("callbacks")]
    trainer = make_trainer(folder, callbacks=callbacks, **options)
    trainer.fit(module, make_loader(make_batches([(8, 3)] * num_batches)))
    return history


def resume(folder: Path, module: L.LightningModule, checkpoint: Path | None, steps: int) -> None:
    """One step per epoch, up to `steps` of them, from a checkpoint to `last.ckpt`."""
    trainer = make_trainer(
        folder,
        callbacks=[ExpertLoadMonitor(every_n_steps=1)],
        max_steps=steps,
        max_epochs=-1,
    )
    loader = make_loader(make_batches([(8, 3)]))
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
