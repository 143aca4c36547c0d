"""A sweep of jobs made by hand: its table, what each option does, jobs that failed."""

import csv
from pathlib import Path

import pytest

from lightning_moe.cli import main
from lightning_moe.cli.report import planned_jobs
from lightning_moe.report import is_sweep, read_sweep, sweep_page
from tests.kit.run_folder import make_run

JOBS = {
    "0": (["experiment=x", "model.moe.router.lb_loss_weight=0.1", "seed=0"], 2.5, 1.5),
    "1": (["experiment=x", "model.moe.router.lb_loss_weight=0.1", "seed=1"], 2.75, 1.25),
    "2": (["experiment=x", "model.moe.router.lb_loss_weight=0.3", "seed=0"], 3.5, 1.125),
    "10": (["experiment=x", "model.moe.router.lb_loss_weight=0.3", "seed=1"], None, None),
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "SWEEP"
    for name, (overrides, loss, load) in JOBS.items():
        (folder / name / ".hydra").mkdir(parents=True)
        lines = "".join(f"- {word}\n" for word in overrides)
        (folder / name / ".hydra" / "overrides.yaml").write_text(lines)
        if loss is not None:
            metrics = f"epoch,step,train/load_max_over_mean,val/ce\n0,7,{load},{loss}\n"
            make_run(folder / name, metrics=metrics, history=None)
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


def test_jobs_are_told_apart_by_the_options_that_vary(sweep: Path) -> None:
    assert is_sweep(sweep)
    jobs = read_sweep(sweep)
    assert [job.name for job in jobs] == ["0", "1", "2", "10"]
    assert jobs[2].options == {"model.moe.router.lb_loss_weight": "0.3", "seed": "0"}
    assert jobs[2].results["validation cross-entropy"] == 3.5
    assert jobs[2].results["steps"] == 8
    assert jobs[3].run is None
    assert "has no metrics.csv" in jobs[3].problem


def test_the_command_recognises_a_sweep_and_writes_page_and_table(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(sweep)]) == 0
    assert f"{sweep / 'report.html'}: " in capsys.readouterr().out
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["0", "1", "2", "10"]
    assert [row["seed"] for row in rows] == ["0", "1", "0", "1"]
    assert [row["validation cross-entropy"] for row in rows] == ["2.5", "2.75", "3.5", ""]
    assert [row["busiest expert / mean"] for row in rows] == ["1.5", "1.25", "1.125", ""]
    assert rows[0]["tokens per second"] == ""


def test_the_page_shows_runs_means_of_each_option_and_what_failed(sweep: Path) -> None:
    html = sweep_page(sweep, read_sweep(sweep))
    assert "<td>lb_loss_weight=0.1</td><td>2</td><td>2.625</td>" in html
    # The mean of one run: the other has no numbers.
    assert "<td>lb_loss_weight=0.3</td><td>2</td><td>3.5</td>" in html
    assert "<td>seed=0</td><td>2</td><td>3</td>" in html
    assert "job 10: " in html
    assert 'aria-label="Validation loss over load. 0: 1.5, 2.5; 1: 1.25, 2.75; 2: 1.125, 3.5"' in (
        html
    )
    assert 'aria-label="Validation cross-entropy. job 0: 2.5 to 2.5; ' in html
    assert "http" not in html


def test_a_sweep_in_which_no_job_has_started_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "multirun.yaml").touch()
    assert main(["report", str(tmp_path)]) == 1
    assert "none of its jobs has started yet" in capsys.readouterr().err


def test_a_job_with_damaged_files_does_not_hide_the_others(sweep: Path) -> None:
    (sweep / "1" / "metrics.csv").write_text("nonsense\n")
    jobs = read_sweep(sweep)
    assert jobs[1].run is None
    assert "is damaged" in jobs[1].problem
    assert jobs[0].results["validation cross-entropy"] == 2.5


def test_a_job_too_short_to_log_a_step_says_so_beside_its_row(sweep: Path) -> None:
    (sweep / "0" / "config.yaml").write_text("trainer: {log_every_n_steps: 10}\n")
    (sweep / "0" / "metrics.csv").write_text("epoch,step,val/ce\n0,2,4.5\n")
    job = read_sweep(sweep)[0]
    assert job.results["validation cross-entropy"] == 4.5
    assert "trainer.log_every_n_steps=10" in job.problem


def test_headings_tell_options_with_one_last_name_apart(sweep: Path) -> None:
    for job in sweep.glob("*/.hydra/overrides.yaml"):
        text = job.read_text() + f"- model.moe.shared.hidden_size={job.parents[1].name}\n"
        job.write_text(text + f"- model.moe.hidden_size={job.parents[1].name}\n")
    html = sweep_page(sweep, read_sweep(sweep))
    assert ">lb_loss_weight</th>" in html
    assert ">shared.hidden_size</th>" in html
    assert ">moe.hidden_size</th>" in html


def test_a_page_that_cannot_be_written_is_an_error_in_one_line(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "a folder").mkdir()
    for place in (sweep / "a folder", sweep / "multirun.yaml" / "page.html"):
        assert main(["report", str(sweep), "--output", str(place)]) == 1
        text = capsys.readouterr().err
        assert text.startswith(f"error: {place} can't be written: ")
        assert text.endswith("choose another file with --output\n")
    assert list(sweep.glob(".a folder*")) == []


def test_runs_are_compared_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lr, loss in (("A", 0.1, 2.5), ("B", 0.2, 3.5)):
        config = f"optim: {{lr: {lr}, eps: 1}}\ntrainer: {{default_root_dir: {tmp_path / name}}}\n"
        metrics = f"epoch,step,train/grad_norm,val/ce\n0,7,1.5,{loss}\n"
        make_run(tmp_path / name, metrics=metrics, config=config, history=None)
    assert main(["report", "A", "B"]) == 0
    assert "comparison.html: " in capsys.readouterr().out
    html = (tmp_path / "comparison.html").read_text()
    # What is equal in both, and their own folders, are no difference.
    assert '<th scope="col">run</th><th scope="col">lr</th><th scope="col">steps</th>' in html
    assert "<td>A</td><td>0.1</td><td>8</td><td>2.5</td>" in html
    assert 'aria-label="Validation cross-entropy. A: 2.5 to 2.5; B: 3.5 to 3.5"' in html
    assert "Gradient norm before clipping. A: 1.5 to 1.5; B: 1.5 to 1.5" in html
    assert main(["report", "A", "A"]) == 1
    assert "a run is compared with itself: A, A" in capsys.readouterr().err
    assert main(["report", "A", "C", "--output", "page.html"]) == 1
    assert "C is not a folder" in capsys.readouterr().err


PLAN = """hydra:
  sweeper: {_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper, params: {seed: '0,1'}}
  overrides:
    task: [experiment=x, 'model.moe.router.lb_loss_weight=0.1,0.3,0.5']
"""


def test_jobs_that_a_sweep_never_came_to_are_named(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "multirun.yaml").write_text(PLAN)
    # Six jobs, the seed varying slowest; those with 0.5 have no folder.
    assert main(["report", str(sweep)]) == 0
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    late = [tuple(row.values())[:3] for row in rows[4:]]
    assert late == [("2", "0.5", "0"), ("5", "0.5", "1")]
    assert rows[4]["steps"] == ""
    html = (sweep / "report.html").read_text()
    assert "6 jobs in" in html
    assert "job 5: it has not started: the sweep goes on, or was stopped" in html


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "hydra: {}",
        PLAN.replace("BasicSweeper", "Other"),
        PLAN.replace("0.1,0.3,0.5", "glob(*)"),
    ],
)
def test_a_plan_that_cannot_be_known_adds_no_job(sweep: Path, plan: str) -> None:
    (sweep / "multirun.yaml").write_text(plan)
    assert planned_jobs(sweep) == []
