"""A run has a folder of its own, and a resumed run has the options of the run that it goes on with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_moe.cli import main
from lightning_moe.cli.runs import (
    changed_words,
    check_free,
    is_dry,
    new_folder,
    quoted,
    readable,
    resumed_words,
    saved_words,
    value_of,
    with_checkpoint,
)


def _write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "result", ["config.yaml", "metrics.csv", "checkpoints/last.ckpt", "multirun.yaml"]
)
def test_the_folder_of_another_run_is_refused(tmp_path: Path, result: str) -> None:
    folder = tmp_path / "RUN"
    check_free(folder, "hydra.run.dir")
    _write(folder / "notes.txt")
    check_free(folder, "hydra.run.dir")
    _write(folder / result)
    for resumed in (None, str(tmp_path / "OTHER" / "last.ckpt"), str(folder)):
        with pytest.raises(ValueError, match=r"hydra\.run\.dir=.*RUN holds the results of another"):
            check_free(folder, "hydra.run.dir", resumed)
    check_free(folder, "hydra.run.dir", str(folder / "checkpoints" / "last.ckpt"))


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    names = [new_folder(tmp_path / "runs" / "12-00-00").name for _ in range(3)]
    assert names == ["12-00-00", "12-00-00-2", "12-00-00-3"]


@pytest.mark.parametrize(
    "value", ["runs/epoch=0-step=10.ckpt", "a b", 'say "x"', "back\\slash", "end\\", "x,y", "[a=b]"]
)
def test_hydra_takes_a_quoted_value_as_it_is(value: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"ckpt_path={quoted(value)}"])
    assert override.value() == value


def test_an_equals_sign_in_a_path_needs_no_quotes() -> None:
    word = readable("ckpt_path=runs/epoch=0-step=10.ckpt")
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == "runs/epoch=0-step=10.ckpt"
    assert value_of([word], "ckpt_path") == "runs/epoch=0-step=10.ckpt"
    for untouched in ("a=1", "a='b=c'", "--config-dir=a=b", "a={b: c}", "~a"):
        assert readable(untouched) == untouched


def test_the_latest_checkpoint_is_the_newest_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"ckpt_path=latest: there is no .*below runs"):
        with_checkpoint(["ckpt_path=latest"])
    for age, name in enumerate(
        (
            "runs/b/3/checkpoints/best_step2.ckpt",
            "runs/b/2/sigterm.ckpt",
            "runs/a/1/checkpoints/last.ckpt",
            "mine/checkpoints/last.ckpt",
        )
    ):
        os.utime(_write(Path(name)), (1000 - age, 1000 - age))
    for words, name in (
        ([], "runs/b/2/sigterm.ckpt"),
        (["experiment=a"], "runs/a/1/checkpoints/last.ckpt"),
        (["name=b", "experiment=a"], "runs/b/2/sigterm.ckpt"),
        (["hydra.run.dir=mine"], "mine/checkpoints/last.ckpt"),
    ):
        assert with_checkpoint(["ckpt_path=latest", *words]) == [*words, f'ckpt_path="{name}"']
    assert with_checkpoint(["ckpt_path=x"]) == ["ckpt_path=x"]


def test_a_group_may_be_null() -> None:
    assert readable("logger=null") == "~logger"
    assert readable("ckpt_path=null") == "ckpt_path=null"


def test_a_resumed_run_has_the_words_of_its_run_unless_given_again() -> None:
    saved = [
        "experiment=a",
        "model.moe.router.top_k=1",
        "+trainer.max_time=1",
        "trainer.max_steps=5",
    ]
    words = ["ckpt_path=x", "trainer.max_steps=9", "experiment=a"]
    assert resumed_words(words, saved) == [
        "model.moe.router.top_k=1",
        "+trainer.max_time=1",
        "init_from=null",
        *words,
    ]
    assert changed_words(words, saved) == ["trainer.max_steps=9 instead of trainer.max_steps=5"]
    assert resumed_words(words, []) == words


def test_saved_words_are_found_beside_the_checkpoint_and_run_no_code(tmp_path: Path) -> None:
    words = [
        "seed=3",
        "ckpt_path=old",
        "init_from=old",
        "hydra.run.dir=there",
        "hydra/launcher=joblib",
        "+callbacks.x={_target_: os.system, command: echo}",
        "callbacks.last._target_=os.system",
    ]
    _write(tmp_path / "overrides.yaml", str(words))
    for checkpoint in ("sigterm.ckpt", "checkpoints/last.ckpt"):
        assert saved_words(str(tmp_path / checkpoint)) == ["seed=3"]
    assert saved_words(str(tmp_path / "too" / "far" / "last.ckpt")) == []
    for damaged in ("a: 1", "[1]", "[", "!!python/object/apply:os.system ['echo RAN']"):
        _write(tmp_path / "overrides.yaml", damaged)
        with pytest.raises(ValueError, match=r"overrides\.yaml is damaged"):
            saved_words(str(tmp_path / "sigterm.ckpt"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [("true", True), ("3", True), ("false", False), ("0", False), ("null", False)],
)
def test_a_dry_run_is_known_by_its_word(word: str, *, expected: bool) -> None:
    assert is_dry([f"trainer.fast_dev_run={word}"]) == expected
    assert not is_dry([])


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_command_that_is_refused_a_folder_leaves_it_as_it_was(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _write(tmp_path / "RUN" / "sigterm.ckpt", "weights")
    _write(tmp_path / "RUN" / ".hydra" / "overrides.yaml", "[]")
    words = [f"hydra.run.dir={tmp_path}/RUN"]
    if command == "evaluate":
        words.append(f"ckpt_path={checkpoint}")
    assert main([command, *words]) == 1
    said = capsys.readouterr()
    assert "holds the results of another run (sigterm.ckpt)" in said.err
    assert "Traceback" not in said.err + said.out
    files = [path for path in (tmp_path / "RUN").rglob("*") if path.is_file()]
    assert {path.name: path.read_text() for path in files} == {
        "sigterm.ckpt": "weights",
        "overrides.yaml": "[]",
    }


def _sweep(folder: Path) -> str:
    """Run a sweep in a process of its own, since Hydra leaves its logging behind; give what it says."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lightning_moe",
            "train",
            "-m",
            "optim.lr=-1,-2",
            "hydra.sweep.dir=sweep",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def test_every_failed_job_of_a_sweep_is_summed_up_and_the_exit_code_says_so(tmp_path: Path) -> None:
    assert _sweep(tmp_path).endswith(
        "2 of 2 jobs failed:\n"
        "  job 0 (optim.lr=-1): optim.lr=-1.0 must be finite and at least 0\n"
        "  job 1 (optim.lr=-2): optim.lr=-2.0 must be finite and at least 0\n"
    )
    assert "sweep holds the results of another run (multirun.yaml)" in _sweep(tmp_path)
