"""What the load monitor counts and logs, and that it disturbs nothing."""

import copy
import csv
import dataclasses
import inspect
import math
import pickle
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_moe.callbacks import ExpertLoadMonitor, read_history
from tests.kit.modules import Recording, Scripted, ScriptedTwoOptimizers
from tests.kit.monitored import HISTORY, RECORDS, Failing, fit
from tests.kit.records import routing_record
from tests.kit.runs import (
    GAMMA,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)


def test_an_entry_adds_up_the_steps_since_the_one_before(tmp_path: Path) -> None:
    fit(tmp_path, Scripted(RECORDS), 5, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
    history = read_history(tmp_path / HISTORY)
    assert history["steps"].tolist() == [1, 3, 4]
    assert history["num_steps"].tolist() == [2, 2, 1]
    assert history["requested_0"].tolist() == [[4, 6, 2, 4], [10, 2, 2, 2], [1, 1, 3, 3]]
    assert history["kept_0"].tolist() == [[3, 3, 2, 3], [6, 2, 2, 2], [1, 1, 3, 3]]
    assert history["rank_load_0"].tolist() == [[11], [12], [8]]
    assert history["lost_tokens_0"].tolist() == [1, 2, 0]
    # 4 * sum of shares of copies times shares of scores; scores 1.5, 3.5, 2, 1 and 8, 0, 0, 0.
    first = 4 * (4 * 1.5 + 6 * 3.5 + 2 * 2 + 4 * 1) / (16 * 8)
    np.testing.assert_allclose(history["balance_0"], [first, 4 * 10 / 16, 1.0], rtol=1e-12)
    np.testing.assert_allclose(history["inner_0"], history["balance_0"] - 1, atol=1e-12)
    assert np.isnan(history["margin_0"]).all()
    integers = {name for name, values in history.items() if values.dtype == np.int64}
    assert integers == {
        "steps",
        "num_steps",
        "requested_0",
        "kept_0",
        "rank_load_0",
        "lost_tokens_0",
    }


class _Handled(L.Callback):
    """The names that the Trainer handles at every step."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.names = " ".join(trainer.fit_loop._results)


def test_the_trainer_does_not_handle_an_entry_again_at_later_steps(tmp_path: Path) -> None:
    handled = _Handled()
    history = fit(
        tmp_path, Scripted(RECORDS), 2, callbacks=[ExpertLoadMonitor(every_n_steps=1), handled]
    )
    assert "train/load_max_over_mean" in handled.names
    assert "train/load_max_over_mean/layer_0" not in handled.names
    assert "train/load_max_over_mean/layer_0" in history.steps[1]


def test_what_is_logged_of_an_entry(tmp_path: Path) -> None:
    steps = fit(
        tmp_path, Scripted(RECORDS), 4, callbacks=[ExpertLoadMonitor(every_n_steps=2)]
    ).steps
    # Of the step by itself, at every step.
    assert [step["train/load_max_over_mean"] for step in steps] == [2.0, 3.0, 1.0, 4.0]
    assert "train/dead_experts" not in steps[0]
    assert steps[1]["train/load_max_over_mean/layer_0"] == 3.0
    for key, values in {
        "dead_experts": (0.0, 0.0),
        "dropped_routes": (5 / 16, 4 / 16),
        "lost_tokens": (1 / 8, 2 / 8),
        "balance_inner_product": (35 / 32 - 1, 1.5),
    }.items():
        for step, value in zip((steps[1], steps[3]), values, strict=True):
            assert step[f"train/{key}"] == step[f"train/{key}/layer_0"] == pytest.approx(value)
    assert steps[1]["train/gerrymandered_layers"] == 0.0
    # No router traced, there is one rank.
    assert not [key for key in steps[3] if "margin" in key or "rank_load" in key]


def test_the_load_is_that_of_the_busiest_expert_over_the_mean_of_the_whole_step(
    tmp_path: Path,
) -> None:
    monitor = ExpertLoadMonitor(write_files=False)
    options = {"callbacks": [monitor], "accumulate_grad_batches": 2}
    # Sums 4, 8, 0, 4 around a mean of 4, though each micro-batch by itself is more uneven.
    records = [routing_record([4, 0, 0, 4]), routing_record([0, 8, 0, 0])]
    [logged] = fit(tmp_path, Scripted(records), 2, **options).steps
    assert logged["train/load_max_over_mean"] == 2.0
    assert logged["train/load_max_over_mean/layer_0"] == 2.0


def test_the_worst_layer_of_the_step_is_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(
        make_module(tiny_config(bias_gamma=GAMMA)),
        make_loader(make_batches([(8, 3)])),
        make_loader(make_batches([(8, 3)])),
    )
    logged = trainer.callback_metrics
    layers = [logged[f"train/load_max_over_mean/layer_{layer}"] for layer in range(2)]
    assert logged["train/load_max_over_mean"] == max(layers)
    assert layers[0] != layers[1]


def test_by_default_an_entry_ends_where_the_loggers_write(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ExpertLoadMonitor()
    fit(tmp_path, Scripted(RECORDS), 5, callbacks=[monitor], logger=logger, log_every_n_steps=3)
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [2, 4]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert (row["step"], row["train/dead_experts/layer_0"]) == ("2", "0.0")


def test_margins_are_taken_in_the_last_step_of_an_entry_and_change_nothing(tmp_path: Path) -> None:
    batches = make_batches([(8, 3), (7, 2), (1, 5), (2, 8), (3, 3), (4, 4)])
    runs = []
    for folder, n in ((tmp_path / "often", 1), (tmp_path / "rarely", 3)):
        module = make_module(tiny_config(lb_loss_weight=0.1))
        monitor = ExpertLoadMonitor(every_n_steps=n)
        runs.append(run(folder, module, batches, callbacks=[monitor], accumulate_grad_batches=2))
        assert not any(layer.router.trace for layer in module.moe_layers)
    assert all(torch.equal(a, runs[1].weights[name]) for name, a in runs[0].weights.items())
    often, rarely = (read_history(tmp_path / name / HISTORY) for name in ("often", "rarely"))
    assert rarely["requested_1"].tolist() == [often["requested_1"].sum(axis=0).tolist()]
    for name in ("margin_0", "entropy_0", "margin_1", "entropy_1"):
        assert np.isfinite(often[name]).all()
        assert rarely[name].tolist() == [often[name][2]]
    assert runs[1].steps[2]["train/router_margin"] == min(
        rarely["margin_0"][0], rarely["margin_1"][0]
    )
    assert "train/router_margin" not in runs[1].steps[1]


def test_history_and_logs_agree_with_the_routers(tmp_path: Path) -> None:
    """One step over two micro-batches; the records are taken from the module beforehand."""
    module = make_module(tiny_config(lb_loss_weight=0.1)).double()
    batches = make_batches([(8, 3), (7, 2)])
    for layer in module.moe_layers:
        layer.router.trace = True
    with torch.no_grad():
        records = [
            module.model.features(batch.ids_BS, valid_BS=batch.labels_BS != -100)[1]
            for batch in batches
        ]
    run(
        tmp_path,
        module,
        batches,
        callbacks=[ExpertLoadMonitor(every_n_steps=1)],
        accumulate_grad_batches=2,
    )
    history = read_history(tmp_path / HISTORY)
    for layer in range(2):
        both = [of_batch[layer] for of_batch in records]
        counts = sum(record.requested_E for record in both)
        assert history[f"requested_{layer}"].tolist() == [counts.tolist()]
        shares = sum(record.score_sums_E for record in both) / 20
        loss = 4 * (counts.double() / counts.sum() * shares).sum().item()
        assert history[f"balance_{layer}"][0] == pytest.approx(loss, rel=1e-9)
        margins = torch.cat([record.tokens.margin_T[record.tokens.valid_T] for record in both])
        assert history[f"margin_{layer}"][0] == pytest.approx(margins.mean().item(), rel=1e-9)


class _ManyEvaluations(Scripted):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3)


@pytest.mark.parametrize("kind", [ScriptedTwoOptimizers, _ManyEvaluations])
def test_a_step_counts_once_with_two_optimizers_and_with_one_that_evaluates_often(
    tmp_path: Path, kind: type[Scripted]
) -> None:
    fit(tmp_path, kind(RECORDS), 2, callbacks=[ExpertLoadMonitor(every_n_steps=50)])
    history = read_history(tmp_path / HISTORY)
    assert history["requested_0"].tolist() == [[4, 6, 2, 4]]
    assert history["kept_0"].tolist() == [[3, 3, 2, 3]]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_entries_end_every_so_many_batches_with_two_optimizers(tmp_path: Path, every: int) -> None:
    module = ScriptedTwoOptimizers(RECORDS)
    trainer = make_trainer(
        tmp_path, callbacks=[ExpertLoadMonitor(every_n_steps=every)], max_epochs=3
    )
    trainer.fit(module, make_loader(make_batches([(8, 3)] * 2)))
    assert read_history(tmp_path / HISTORY)["num_steps"].tolist() == [every] * (6 // every)


@pytest.mark.parametrize(("every", "log_every"), [(4, 1), (3, 2)])
def test_loggers_get_an_entry_once_at_its_own_step(
    tmp_path: Path, every: int, log_every: int
) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ExpertLoadMonitor(every_n_steps=every)
    options = {"logger": logger, "log_every_n_steps": log_every, "max_epochs": 2}
    fit(tmp_path, Scripted(RECORDS), 4, callbacks=[monitor], **options)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [int(row["step"]) for row in rows if row["train/dead_experts/layer_0"]]
    assert found == [step for step in range(8) if (step + 1) % every == 0]


def test_a_step_whose_scores_are_not_finite_has_no_balance_in_its_entry(tmp_path: Path) -> None:
    records = [RECORDS[0]] * 4
    records[1] = dataclasses.replace(RECORDS[0], score_sums_E=torch.full((4,), math.nan))
    monitor = ExpertLoadMonitor(every_n_steps=2)
    steps = fit(tmp_path, Scripted(records), 4, callbacks=[monitor]).steps
    history = read_history(tmp_path / HISTORY)
    assert np.isnan(history["balance_0"]).tolist() == [True, False]
    assert history["requested_0"].tolist() == [[8, 0, 0, 8]] * 2
    assert "train/balance_inner_product" not in steps[1]


def test_the_monitor_listens_during_fit_only_and_copies_are_not_listened_to(
    tmp_path: Path,
) -> None:
    module = Scripted(RECORDS)
    fit(tmp_path, module, 2, callbacks=[ExpertLoadMonitor(), ExpertLoadMonitor()])
    assert module.window.observers == []
    module.window.observers.append(print)
    copies = [copy.deepcopy(module.window), pickle.loads(pickle.dumps(module.window))]
    assert [window.observers for window in copies] == [[], []]
    assert module.window.observers == [print]


def test_nobody_listens_after_a_failed_run(tmp_path: Path) -> None:
    module = Failing(RECORDS)
    with pytest.raises(OSError, match="the disk is full"):
        fit(tmp_path, module, 5, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
    assert module.window.observers == []


def test_a_router_that_traced_before_goes_on_doing_so(tmp_path: Path) -> None:
    module = Recording()
    module.moe.router.trace = True
    fit(tmp_path, module, 2, callbacks=[ExpertLoadMonitor(every_n_steps=1)])
    assert module.moe.router.trace


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ExpertLoadMonitor\.recent_steps=0 must be at least 1"):
        ExpertLoadMonitor(recent_steps=0)
    with pytest.raises(ValueError, match=r"ExpertLoadMonitor\.every_n_steps=0 must be at least 1"):
        ExpertLoadMonitor(every_n_steps=0)


@pytest.mark.parametrize(
    "option",
    [
        {"every_n_steps": 1.5},
        {"every_n_steps": True},
        {"recent_steps": 2.5},
        {"alarm": "maybe"},
        {"write_files": 1},
    ],
)
def test_options_of_another_kind_are_refused(option: dict[str, object]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(TypeError, match=rf"ExpertLoadMonitor\.{name}={value!r} must be"):
        inspect.unwrap(ExpertLoadMonitor.__init__)(object.__new__(ExpertLoadMonitor), **option)
