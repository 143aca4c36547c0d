"""The words after `lightning-moe`, and what a user sees of an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_moe import __version__
from lightning_moe.cli import main
from lightning_moe.cli.command import COMMANDS
from lightning_moe.cli.process import keep_freed_memory


def test_help_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name} " in text
        assert f"lightning-moe {command.name} " in command.example
        assert command.example in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-moe {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: lightning-moe COMMAND"),
        (["trainn"], "did you mean 'train'?"),
        (["x"], "choose from train, "),
    ],
)
def test_a_wrong_call_says_so_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_of_a_hydra_command_shows_groups_and_examples(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "  strategy: auto, ddp" in text
    assert "$" not in text
    assert f"\n  lightning-moe {command} " in text


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["prepare", "--help"],
        ["options"],
        # So does what options alone show to be wrong.
        ["train", "optim.lr=-1"],
        ["train", "data.batch_size=0", "trainer.max_steps=5"],
        ["train", "ckpt_path=none.ckpt"],
    ],
)
def test_help_and_wrong_values_need_no_torch(tmp_path: Path, words: list[str]) -> None:
    code = (
        "import sys; from lightning_moe.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.typo=1"], "error: model.typo is not an option; choose from vocab_size,"),
        (
            ["trainer.max_stepps=3"],
            "error: trainer.max_stepps is not an option; did you mean trainer.max_steps?",
        ),
        (
            ["model.layer_overrides={3: {recompute: block}}"],
            "error: model.layer_overrides is empty; add to it with a plus: +model.layer_overrides.3=",
        ),
        (
            ["+model.layer_overrides.3={recompute: block}", "optim.lr=-1"],
            "error: optim.lr=-1.0 must be",
        ),
        (["max_steps=5"], "error: max_steps is not an option; did you mean trainer.max_steps?"),
        (
            ["optim.top_k=1"],
            "error: optim.top_k is not an option; did you mean model.moe.router.top_k",
        ),
        (["seed=-1"], "error: seed=-1 must be a whole number from 0 to 4294967295"),
        (
            ["trainer.accumulate_grad_batches=0"],
            "error: trainer.accumulate_grad_batches=0 must be at least 1",
        ),
        (
            ["experiment=null", "trainer.val_check_interval=0"],
            "error: trainer.val_check_interval=0 must be finite and greater than 0",
        ),
        (["trainer.gradient_clip_val=-1"], "error: trainer.gradient_clip_val=-1 must be finite"),
        (["+trainer.logger=false"], "error: trainer.logger=False has no effect; use the group"),
        (["~trainer"], "error: trainer=None must be a group of options"),
        (["model=tinny"], "error: In 'train': Could not find 'model/tinny'"),
        (["optim.lr=-1"], "error: optim.lr=-1.0 must be finite and at least 0"),
        (
            ["ckpt_path=none.ckpt"],
            "error: ckpt_path=none.ckpt does not exist; give the path of a checkpoint",
        ),
        (
            ["init_from=none.ckpt"],
            "error: init_from=none.ckpt does not exist; give the path of a checkpoint",
        ),
        (
            ["+trainer.plugins=[{_target_: lightning_moe.MoEPrecision, experts: mxfp8}]"],
            "error: trainer.precision=32-true clashes with MoEPrecision in trainer.plugins",
        ),
        (
            ["+trainer.plugins={_target_: lightning_moe.MoEPrecision, experts: mxfp8}"],
            "error: trainer.precision=32-true clashes with MoEPrecision in trainer.plugins",
        ),
        (["data.paths=[none.txt]"], "error: data.paths='none.txt' does not exist; check the path"),
        (
            ["experiment=tiny_anneal"],
            "error: init_from=RUN/checkpoints/last.ckpt does not exist; give the path",
        ),
    ],
)
def test_an_error_of_the_user_is_one_message_at_the_end_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    arguments, environment = list(sys.argv), dict(os.environ)
    assert main(["train", *overrides]) == 1
    text = capsys.readouterr().err
    assert text.startswith(message)
    assert "Traceback" not in text
    assert "HYDRA_FULL_ERROR" not in text
    assert list(tmp_path.rglob("*.ckpt")) == []
    assert (sys.argv, dict(os.environ)) == (arguments, environment)


def test_the_traceback_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["train", "optim.lr=-1"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.endswith("error: ValueError: optim.lr=-1.0 must be finite and at least 0\n")


def test_evaluate_needs_a_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate"]) == 1
    assert capsys.readouterr().err == "error: Missing mandatory value: ckpt_path\n"


def test_prepare_reports_what_it_wrote_and_refuses_to_replace_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    call = ["prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "tokens.npy")]
    assert main(call) == 0
    assert (
        "tokens.npy: 4 tokens (uint16, ids below 257, 256 ends a document) from 1 documents, 3 bytes"
        in (capsys.readouterr().out)
    )
    assert main(call) == 1
    # Nothing was done, so no bar is shown.
    seen = capsys.readouterr()
    assert "on the command line --overwrite" in seen.err
    assert seen.out == ""
    assert main([*call, "--overwrite"]) == 0


def test_keep_freed_memory_says_whether_it_is_possible() -> None:
    # glibc on Linux; False elsewhere, never an error.
    assert keep_freed_memory() in (True, False)
