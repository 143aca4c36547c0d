"""SIGTERM ends the command line with a checkpoint, one statement about it, and the exit code of shells."""

import os
import signal
from pathlib import Path

import lightning as L
import pytest

from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.cli import main
from tests.e2e.test_cli import SMALL


class Terminate(L.Callback):
    """Sends SIGTERM in the first micro-batch of the second step of two."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_on_one_process_finishes_its_step_saves_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (tmp_path / "val.txt").write_text("a lazy fox jumps over the brown dog. " * 8)
    code = main(
        [
            "train",
            *SMALL,
            "trainer.val_check_interval=20",
            "trainer.accumulate_grad_batches=2",
            "trainer.max_steps=9",
            "hydra.run.dir=RUN",
            "+callbacks.terminate={_target_: tests.e2e.test_cli_sigterm.Terminate}",
        ]
    )
    assert code == 128 + signal.SIGTERM
    path = tmp_path / "RUN" / "sigterm.ckpt"
    said = "".join(capfd.readouterr())
    assert f"stopped by SIGTERM at step 2; resume with ckpt_path={path}\n" in said
    assert said.count("resume with") == 1
    assert read_whole(path)["global_step"] == 2
