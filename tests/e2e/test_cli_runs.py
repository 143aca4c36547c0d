"""What a run of the command line keeps, goes on with and survives; in this process, a few steps of a small model."""

import os
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf

from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.cli import main
from lightning_moe.report import read_run
from tests.e2e.test_cli import SMALL, column

Screen = pytest.CaptureFixture[str]


def _train(*words: str, code: int = 0) -> None:
    assert main(["train", *words]) == code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a working folder with texts and RUN, a run of 4 steps with options of its own."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "val.txt").write_text("a lazy fox jumps over the brown dog. " * 8)
    before = Path.cwd()
    os.chdir(folder)
    own = ("model.moe.router.top_k=1", "optim.warmup=2", "trainer.accumulate_grad_batches=2")
    _train(*SMALL, *own, "seed=3", "trainer.val_check_interval=3", *FOUR, "hydra.run.dir=RUN")
    os.chdir(before)
    return folder


FOUR = ("trainer.max_steps=4",)


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def _files(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_report_counts_the_steps_that_were_made(capsys: Screen) -> None:
    # The last validation, after the last step, comes between two of `val_check_interval`.
    assert read_run(Path("RUN")).num_steps == 4
    assert main(["report", "RUN", "--output", "page.html"]) == 0
    assert "of 4 planned" in Path("page.html").read_text()


def test_metrics_have_one_row_per_step() -> None:
    lines = Path("RUN/metrics.csv").read_text().splitlines()
    place = lines[0].split(",").index("step")
    steps = [int(line.split(",")[place]) for line in lines[1:]]
    assert steps == [0, 1, 2, 3]
    assert sorted(column(Path("RUN"), "val/ce")) == [1, 2, 3]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "trainer.fast_dev_run=true"],
        ["train", "trainer.fast_dev_run=true", "ckpt_path=RUN/checkpoints/last.ckpt"],
        ["train"],
        ["evaluate", "ckpt_path=RUN/checkpoints/last.ckpt"],
    ],
)
def test_nothing_but_a_resumption_writes_to_the_folder_of_a_run(words: list[str]) -> None:
    before = _files("RUN")
    command, *rest = words
    options = SMALL if command == "train" and "ckpt_path" not in str(words) else ()
    is_dry = "trainer.fast_dev_run=true" in words
    more_steps = ["trainer.max_steps=5"] if is_dry else []
    code = 0 if is_dry else 1
    assert main([command, *options, *rest, *more_steps, "hydra.run.dir=RUN"]) == code
    assert _files("RUN") == before


def test_a_resumed_run_takes_the_options_of_its_run_and_says_what_differs(capsys: Screen) -> None:
    words = ("ckpt_path=RUN/checkpoints/last.ckpt", "trainer.max_steps=5", "optim.warmup=3")
    _train(*words, "hydra.run.dir=RESUMED")
    config = OmegaConf.load("RESUMED/config.yaml")
    assert config.model.moe.router.top_k == 1
    assert (config.seed, config.optim.warmup) == (3, 3)
    assert config.trainer.accumulate_grad_batches == 2
    said = capsys.readouterr()
    assert "trainer.max_steps=5 instead of trainer.max_steps=4" in said.err
    assert "given differently: optim.warmup  3 instead of 2" in said.out
    # The chain goes on.
    _train("ckpt_path=latest", "hydra.run.dir=RESUMED", "trainer.max_steps=6")
    assert OmegaConf.load("RESUMED/config.yaml").optim.warmup == 3
    assert read_whole("RESUMED/checkpoints/last.ckpt")["global_step"] == 6


def test_a_checkpoint_without_its_run_is_not_resumed_with_other_options(capsys: Screen) -> None:
    Path("alone.ckpt").write_bytes(Path("RUN/checkpoints/last.ckpt").read_bytes())
    words = (*SMALL, "ckpt_path=alone.ckpt", "trainer.max_steps=5")
    _train(*words, "hydra.run.dir=ALONE", code=1)
    assert (
        "error: model.moe.router.top_k=2 is not what ckpt_path=alone.ckpt was trained with, 1;"
        in (capsys.readouterr().err)
    )
    assert not Path("ALONE/config.yaml").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.enable_progress_bar=false"],
        ["trainer.enable_checkpointing=false"],
        ["+trainer.enable_checkpointing=false"],
        ["logger=null"],
        ["~logger"],
        ["callbacks=null"],
        ["callbacks=[default,early_stopping,ema]", "callbacks.last.every_n_steps=1"],
        ["trainer.limit_val_batches=0"],
        ["trainer.max_steps=0"],
    ],
)
def test_an_option_can_be_set_alone(tmp_path: Path, words: list[str]) -> None:
    one = "trainer.max_steps=1"
    _train(*SMALL, one, "trainer.val_check_interval=5", f"hydra.run.dir={tmp_path}/run", *words)
    saves = not {"enable_checkpointing=false", "callbacks=null"} & {
        word.rpartition("trainer.")[2] for word in words
    }
    saved = (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert saved == (saves and "trainer.max_steps=0" not in words)
    assert not (tmp_path / "run" / "lightning_logs").exists()


def test_an_evaluation_of_no_batch_is_refused(capsys: Screen) -> None:
    words = ("ckpt_path=RUN/checkpoints/last.ckpt", "trainer.limit_val_batches=0")
    assert main(["evaluate", *words, "hydra.run.dir=NONE"]) == 1
    assert "trainer.limit_val_batches=0 leaves nothing to evaluate" in capsys.readouterr().err


class Stop(L.Callback):
    """Sends a signal in the first micro-batch of the second step of two."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    "strategy",
    # The shape checker of tests takes no integer for a float.
    [("strategy=auto",), ("strategy=expert_parallel", "strategy.timeout=50.0")],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_finishes_its_step_saves_and_says_once_how_to_resume(
    number: int, strategy: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    words = ("trainer.accumulate_grad_batches=2", "trainer.val_check_interval=20", *FOUR)
    stop = f"+callbacks.stop={{_target_: {__name__}.Stop, number: {int(number)}}}"
    run = Path(f"STOPPED_{number}_{len(strategy)}").absolute()
    _train(*SMALL, *words, stop, *strategy, f"hydra.run.dir={run}", code=128 + number)
    said = "".join(capfd.readouterr())
    assert f"at step 2; resume with ckpt_path={run}/sigterm.ckpt\n" in said
    assert said.count("resume with") == 1
    assert read_whole(run / "sigterm.ckpt")["global_step"] == 2
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_failing_job_leaves_the_others_of_a_sweep_alone(capsys: Screen) -> None:
    words = ("-m", *SMALL, "trainer.max_steps=1", "hydra.sweep.dir=SWEEP")
    _train(*words, "optim.lr=1e-3,-1,1e-4", code=1)
    assert capsys.readouterr().err.endswith(
        "1 of 3 jobs failed:\n  job 1 (optim.lr=-1): optim.lr=-1.0 must be finite and at least 0\n"
    )
    saved = [Path("SWEEP", job, "checkpoints", "last.ckpt").exists() for job in "012"]
    assert saved == [True, False, True]
    rates = [torch.load(f"SWEEP/{job}/checkpoints/last.ckpt")["hyper_parameters"] for job in "02"]
    assert [hyper["optim"]["lr"] for hyper in rates] == [1e-3, 1e-4]
