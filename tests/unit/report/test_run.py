"""The files of a run folder: whole, being written, resumed, damaged."""

import math
from pathlib import Path

import pytest

from lightning_moe.cli import main
from lightning_moe.report import read_run, run_page
from tests.kit.run_folder import METRICS, make_run


def test_a_column_is_a_series_of_its_filled_cells(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path))
    series = run.series("val/ce")
    assert series.steps.tolist() == [1, 3]
    assert series.values.tolist() == [4.5, 2.6875]
    assert (series.last, series.lowest, series.recent_median()) == (2.6875, 2.6875, 2.6875)
    assert run.num_steps == 4
    assert len(run.series("no such column")) == 0
    assert math.isnan(run.series("no such column").last)


def test_options_are_found_by_dotted_name(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path))
    assert run.option("model.moe.router.top_k") == 2
    assert run.option("model.moe.no.such") is None


def test_a_resumed_run_is_one_series_and_its_newest_part_counts(tmp_path: Path) -> None:
    make_run(tmp_path, metrics="epoch,step,train/ce\n0,2,2.5\n0,3,1.5\n")
    (tmp_path / "metrics_1.csv").write_text("epoch,step,train/ce\n0,0,5.0\n0,1,4.0\n")
    (tmp_path / "metrics_2.csv").write_text("epoch,step,train/ce\n0,1,3.5\n0,2,3.0\n")
    series = read_run(tmp_path).series("train/ce")
    assert series.steps.tolist() == [0, 1, 2, 3]
    assert series.values.tolist() == [5.0, 3.5, 2.5, 1.5]


def test_steps_of_a_branch_that_was_left_are_gone_in_every_column(tmp_path: Path) -> None:
    make_run(tmp_path, metrics="epoch,step,train/ce\n0,2,2.5\n0,3,1.5\n")
    earlier = "epoch,step,train/ce,val/ce\n0,1,4.0,4.5\n0,2,3.0,\n0,7,0.5,9.0\n"
    (tmp_path / "metrics_1.csv").write_text(earlier)
    run = read_run(tmp_path)
    assert run.series("train/ce").values.tolist() == [4.0, 2.5, 1.5]
    assert run.series("val/ce").values.tolist() == [4.5]
    assert run.num_steps == 4


def test_a_part_without_a_row_takes_nothing_away(tmp_path: Path) -> None:
    make_run(tmp_path, metrics="epoch,step,train/ce\n")
    (tmp_path / "metrics_1.csv").write_text("epoch,step,train/ce\n0,2,3.0\n")
    assert read_run(tmp_path).series("train/ce").steps.tolist() == [2]


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, metrics=METRICS + "0,4,1.0,1.9"))
    assert run.num_steps == 4


@pytest.mark.parametrize("history", [b"", b"PK\x03\x04 cut", b"no archive at all"])
def test_a_damaged_history_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], history: bytes
) -> None:
    make_run(tmp_path, history=None)
    (tmp_path / "routing_history.npz").write_bytes(history)
    assert main(["report", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: {tmp_path / 'routing_history.npz'} is damaged")
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("", "is damaged: its first line names no column `step`"),
        ("epoch,loss\n0,1\n", "is damaged: its first line names no column `step`"),
        ("epoch,step,loss\n0,1,a\n", "is damaged in line 2: could not convert string to float"),
        ("epoch,step,loss\n0,0,1\n0,1\n", "is damaged in line 3: "),
        ("epoch,step,loss\n0,,1\n", "is damaged in line 2: "),
        ('epoch,step,loss\n0,0,"1\n', "is damaged: "),
    ],
)
def test_damaged_metrics_are_refused_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metrics: str, message: str
) -> None:
    make_run(tmp_path, metrics=metrics)
    assert main(["report", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: {tmp_path / 'metrics.csv'} {message}")
    assert not (tmp_path / "report.html").exists()


def test_metrics_that_are_no_text_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged: it is no text file"):
        read_run(tmp_path)


@pytest.mark.parametrize("config", ["a: [1,\n", "- 1\n", ""])
def test_damaged_options_are_refused(tmp_path: Path, config: str) -> None:
    make_run(tmp_path, config=config)
    with pytest.raises(ValueError, match=r"config\.yaml is damaged"):
        read_run(tmp_path)


def test_a_folder_that_is_missing_or_holds_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none")]) == 1
    assert f"{tmp_path / 'none'} is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert f"{tmp_path} has no metrics.csv" in capsys.readouterr().err


def test_report_is_a_command_with_plain_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report"])
    assert stop.value.code == 2
    assert "usage: lightning-moe report" in capsys.readouterr().err


SHORT = "epoch,step,val/ce\n0,2,4.5\n"


def test_a_run_too_short_to_log_a_step_says_so(tmp_path: Path) -> None:
    config = "trainer: {log_every_n_steps: 10}\n"
    run = read_run(make_run(tmp_path / "short", metrics=SHORT, config=config))
    assert "trainer.log_every_n_steps=10" in run.silence
    assert "no training step was logged: trainer.log_every_n_steps=10" in run_page(run)
    # Three steps are enough for this one, and what another module logs isn't known.
    config = "trainer: {log_every_n_steps: 3}\n"
    assert read_run(make_run(tmp_path / "b", metrics=SHORT, config=config)).silence == ""
    assert read_run(make_run(tmp_path / "c", metrics=SHORT, config=None)).silence == ""
    long = read_run(make_run(tmp_path / "d", config="trainer: {log_every_n_steps: 10}\n"))
    assert long.silence == ""
