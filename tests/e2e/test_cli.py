"""The command line as a user runs it: real processes, a few steps of a very small model."""

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_moe.cli import main

SMALL = (
    "data.paths=[train.txt]",
    "data.val_paths=[val.txt]",
    "data.sequence_length=32",
    "data.batch_size=4",
    "model.d_model=32",
    "model.num_layers=2",
    "model.dense_hidden_size=32",
    "model.moe.hidden_size=16",
    "model.moe.shared.hidden_size=16",
    "optim.lr=1e-2",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
    "trainer.num_sanity_val_steps=0",
)
TRACED = ("callbacks=routing_trace", "callbacks.routing_trace.steps=[1,4]")


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "lightning_moe", *words],
        cwd=folder,
        # One thread: the same sums in every process.
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def train(folder: Path, *overrides: str) -> str:
    result = call(folder, "train", *SMALL, *overrides)
    assert result.returncode == 0, result.stderr
    return result.stdout


def column(run: Path, name: str) -> dict[int, float]:
    """Give a column of metrics.csv by step."""
    with (run / "metrics.csv").open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a working folder with texts and RUN, a run of 6 steps that keeps every checkpoint."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "val.txt").write_text("a lazy fox jumps over the brown dog. " * 8)
    text = train(
        folder,
        *TRACED,
        "trainer.max_steps=6",
        "callbacks.best.save_top_k=-1",
        "hydra.run.dir=RUN",
    )
    (folder / "screen.txt").write_text(text)
    return folder


def test_a_run_folder_holds_everything(folder: Path) -> None:
    run = folder / "RUN"
    for name in (
        "config.yaml",
        "metrics.csv",
        "loss.png",
        "expert_load.png",
        "expert_load_history.png",
        "routing_history.npz",
        "train.log",
        "checkpoints/last.ckpt",
        "checkpoints/best_step2.ckpt",
        ".hydra/overrides.yaml",
    ):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").glob("events.*"))
    config = OmegaConf.load(run / "config.yaml")
    assert config.optim.lr == 1e-2
    assert config.data.vocab_size == 264
    assert config.trainer.default_root_dir == str(run)


def test_the_loss_falls(folder: Path) -> None:
    loss = column(folder / "RUN", "train/ce")
    assert list(loss) == [0, 1, 2, 3, 4, 5]
    assert loss[5] < loss[0] < 1.1 * math.log(264)
    val = column(folder / "RUN", "val/ce")
    assert len(val) == 3
    assert val[5] < val[1]


def test_the_report_names_checkpoint_and_baselines(folder: Path) -> None:
    text = (folder / "screen.txt").read_text()
    for words in ("model", "bigram counts", "unigram counts", "bits per byte"):
        assert words in text
    last = folder / "RUN" / "checkpoints" / "last.ckpt"
    assert f"checkpoint  {last}\n" in text
    assert f"run folder  {folder / 'RUN'}\n" in text
    assert f"{column(folder / 'RUN', 'val/bits_per_byte')[5]:.4f}" in text


def test_nothing_alarming_is_on_the_screen(folder: Path) -> None:
    result = call(folder, "train", *SMALL, "trainer.max_steps=1", "hydra.run.dir=quiet")
    assert result.returncode == 0
    assert result.stderr == ""
    # No validation took place, and yet the run has a checkpoint and a report.
    assert (folder / "quiet" / "checkpoints" / "last.ckpt").is_file()
    assert "bigram counts" in result.stdout


@pytest.mark.parametrize("checkpoint", ["best_step2", "best_step4"])
def test_a_resumed_run_equals_a_straight_one_exactly(
    folder: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / f"resumed_{checkpoint}"
    text = train(
        folder,
        *TRACED,
        "trainer.max_steps=6",
        f"ckpt_path=RUN/checkpoints/{checkpoint}.ckpt",
        f"hydra.run.dir={run.name}",
    )
    assert f" {6 - int(checkpoint[-1])} steps in " in text
    resumed = column(run, "train/ce")
    assert resumed == {step: column(folder / "RUN", "train/ce")[step] for step in resumed}
    assert list(resumed) == list(range(int(checkpoint[-1]), 6))
    ours, theirs = (
        torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)
        for path in (run, folder / "RUN")
    )
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, weight in ours["state_dict"].items():
        assert torch.equal(weight, theirs["state_dict"][name]), name
    # Step 1 was done before the checkpoint; all that both have is equal.
    assert main(["routes-diff", str(run), str(folder / "RUN")]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "only in B: step 1, micro-batch 0, layer 0 Every token took the same route" in text
    assert "with the same weights." in text


def test_a_longer_run_goes_on_from_the_last_checkpoint_in_the_same_folder(folder: Path) -> None:
    train(folder, "trainer.max_steps=3", "hydra.run.dir=longer")
    train(
        folder,
        "trainer.max_steps=6",
        "ckpt_path=longer/checkpoints/last.ckpt",
        "hydra.run.dir=longer",
    )
    straight = column(folder / "RUN", "train/ce")
    assert column(folder / "longer", "train/ce") == {step: straight[step] for step in (3, 4, 5)}
    # The first part of the run keeps its numbers.
    with (folder / "longer" / "metrics_1.csv").open() as file:
        assert len(list(csv.DictReader(file))) >= 3


def test_annealing_starts_at_step_0_with_the_weights_of_the_checkpoint(folder: Path) -> None:
    train(
        folder,
        "init_from=RUN/checkpoints/last.ckpt",
        "data.seed=1",
        "optim.schedule=wsd",
        "optim.decay=2",
        "trainer.max_steps=2",
        "hydra.run.dir=anneal",
    )
    rate, loss = column(folder / "anneal", "train/lr"), column(folder / "anneal", "train/ce")
    assert rate == {0: pytest.approx(1e-2), 1: pytest.approx(5e-3)}
    assert loss[0] < column(folder / "RUN", "train/ce")[2]


def test_a_multirun_gives_each_job_a_folder_of_its_own(folder: Path) -> None:
    train(
        folder,
        "-m",
        # Its own values of what it sweeps give way to these, its share of the text to val.txt.
        "experiment=balance_sweep",
        "data.val_fraction=null",
        "trainer.max_steps=2",
        "optim.warmup=1",
        "optim.decay=1",
        "model.moe.router.lb_loss_weight=1e-2",
        "model.moe.router.lb_loss_scope=sequence",
        "model.moe.router.bias_gamma=null,1e-1",
        "hydra.sweep.dir=sweep",
    )
    for number, gamma in (("0", None), ("1", 0.1)):
        run = folder / "sweep" / number
        assert OmegaConf.load(run / "config.yaml").model.moe.router.bias_gamma == gamma
        assert list(column(run, "train/ce")) == [0, 1]
        checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["hyper_parameters"]["config"]["moe"]["router"]["bias_gamma"] == gamma
    # The bias acts first on the second step.
    first, second = (column(folder / "sweep" / number, "train/ce") for number in ("0", "1"))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert main(["report", str(folder / "sweep")]) == 0
    with (folder / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model.moe.router.bias_gamma"] for row in rows] == ["null", "0.1"]
    assert "model.moe.router.lb_loss_weight" not in rows[0]
    for row in rows:
        loss = column(folder / "sweep" / row["job"], "val/ce")[1]
        assert float(row["validation cross-entropy"]) == pytest.approx(loss, rel=1e-5)


def test_evaluate_equals_the_validation_of_the_run(folder: Path) -> None:
    result = call(
        folder, "evaluate", "ckpt_path=RUN/checkpoints/last.ckpt", "hydra.run.dir=evaluation"
    )
    assert result.returncode == 0, result.stderr
    (ours,) = column(folder / "evaluation", "val/ce").values()
    assert ours == pytest.approx(column(folder / "RUN", "val/ce")[5], rel=1e-6)
    assert "bigram counts" in result.stdout


def test_prepared_tokens_train_like_the_text_they_come_from(folder: Path) -> None:
    assert call(folder, "prepare", "train.txt", "--output", "train.npy").returncode == 0
    assert main(["prepare", str(folder / "val.txt"), "--output", str(folder / "val.npy")]) == 0
    train(
        folder,
        "data.paths=[train.npy]",
        "data.val_paths=[val.npy]",
        "trainer.max_steps=2",
        "hydra.run.dir=tokens",
    )
    for name, steps in (("train/ce", (0, 1)), ("val/bits_per_byte", (1,))):
        ours, theirs = column(folder / "tokens", name), column(folder / "RUN", name)
        assert ours == {step: theirs[step] for step in steps}


def test_a_truncated_checkpoint_is_refused_in_one_line_before_anything_is_written(
    folder: Path,
) -> None:
    whole = (folder / "RUN" / "checkpoints" / "last.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    result = call(folder, "train", *SMALL, "ckpt_path=cut.ckpt", "hydra.run.dir=refused")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ckpt_path=cut.ckpt can't be read as a checkpoint")
    assert result.stderr.count("\n") == 1
    assert list((folder / "refused").rglob("*.ckpt")) == []
    assert not (folder / "refused" / "metrics.csv").exists()
