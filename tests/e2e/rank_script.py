"""A user's training script, run by tests as processes: `rank_script.py FOLDER FAULT [keyword=value ...]`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_moe import ExpertParallelStrategy, TokenBatch
from tests.kit.rank_trainers import Resumable, batches, make_module, rank_trainer

FAULT_STEP = 4
SIGNALS = {
    "term": signal.SIGTERM,
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "int": signal.SIGINT,
}


class Fault(L.Callback):
    """`raise@1`: rank 1 raises before step 4; `term@0`: rank 0 is sent SIGTERM in the middle of it; and so on.

    `grow@1`: rank 1 gets twice as many tokens in that step.
    """

    def __init__(self, fault: str, folder: Path) -> None:
        self.kind, _, rank = fault.partition("@")
        self.rank, self.folder = int(rank or -1), folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        (self.folder / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step != FAULT_STEP or trainer.global_rank != self.rank:
            return
        (self.folder / "fault").write_text(str(time.time()))
        if self.kind == "raise":
            raise ValueError("the first cause")
        if self.kind == "grow":
            return
        os.kill(os.getpid(), SIGNALS[self.kind])
        time.sleep(0.2)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        with (self.folder / f"steps-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step}\n")


def main() -> None:
    folder, fault, *options = sys.argv[1:]
    keywords = dict(option.split("=", 1) for option in options)
    # A job in the background of a shell starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    world = int(keywords.get("devices", 2))
    callbacks: list[L.Callback] = [Fault(fault, Path(folder))]
    if "saver" in keywords:
        callbacks.append(OnExceptionCheckpoint(folder, "exception"))
    dispatcher = keywords.get("dispatcher", "all_to_all")
    strategy = ExpertParallelStrategy(
        dispatcher=dispatcher,
        timeout=float(keywords.get("timeout", 600)),
    )
    trainer = rank_trainer(
        world,
        keywords.get("strategy", strategy),
        callbacks=callbacks,
        enable_checkpointing="saver" in keywords,
        max_steps=int(keywords.get("steps", 8)),
        default_root_dir=folder,
        num_nodes=int(keywords.get("nodes", 1)),
    )
    module = make_module().double()
    own = batches(trainer.global_rank, world)
    if fault == f"grow@{trainer.global_rank}":
        ids, labels = own[FAULT_STEP].ids_BS, own[FAULT_STEP].labels_BS
        own[FAULT_STEP] = TokenBatch(ids_BS=ids.repeat(2, 1), labels_BS=labels.repeat(2, 1))
    data = Resumable(own, batch_size=None)
    trainer.fit(module, data, ckpt_path=keywords.get("ckpt"))
    weights = sum(p.double().abs().sum().item() for p in module.parameters())
    result = {"step": trainer.global_step, "rank": trainer.global_rank, "weights": weights}
    (Path(folder) / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
