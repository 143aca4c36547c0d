"""What the load monitor counts, logs, keeps as a history and shows."""

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
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from lightning_moe import TokenBatch
from lightning_moe.callbacks import ExpertLoadMonitor, read_history, routing_history
from lightning_moe.callbacks.routing_history import entries_before, write_history
from lightning_moe.callbacks.routing_sums import RoutingSums
from lightning_moe.nn import Routing, TokenRoutes
from tests.e2e.own_modules import Recording
from tests.e2e.runs import (
    History,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)

HISTORY = "routing_history.npz"


def _record(counts: list[int], kept: list[int], scores: list[float], lost: int) -> Routing:
    """Of top-2 choices, as `Recording` makes them."""
    return Routing(
        requested_E=torch.tensor(counts),
        kept_E=torch.tensor(kept),
        score_sums_E=torch.tensor(scores),
        logz_squared=torch.tensor(0.0),
        num_tokens=torch.tensor(sum(counts) // 2),
        lost_tokens=torch.tensor(lost),
    )


# Of five steps; the third is even.
RECORDS = [
    _record([4, 0, 0, 4], [3, 0, 0, 3], [1.0, 1.0, 1.0, 1.0], 1),
    _record([0, 6, 2, 0], [0, 3, 2, 0], [0.5, 2.5, 1.0, 0.0], 0),
    _record([2, 2, 2, 2], [2, 2, 2, 2], [4.0, 0.0, 0.0, 0.0], 0),
    _record([8, 0, 0, 0], [4, 0, 0, 0], [4.0, 0.0, 0.0, 0.0], 2),
    _record([1, 1, 3, 3], [1, 1, 3, 3], [1.0, 1.0, 1.0, 1.0], 0),
]


class _Scripted(Recording):
    """Hands in given records, one per batch."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        self.window.record([RECORDS[batch_idx]])
        return self.loss_sum(batch)[0] * 1e-3


def _fit(folder: Path, module: L.LightningModule, num_batches: int, **options: object) -> History:
    history = History()
    callbacks = [history, *options.pop("callbacks")]
    trainer = make_trainer(folder, callbacks=callbacks, **options)
    trainer.fit(module, make_loader(make_batches([(8, 3)] * num_batches)))
    return history


def test_an_entry_adds_up_the_steps_since_the_one_before(tmp_path: Path) -> None:
    _fit(tmp_path, _Scripted(), 5, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
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


def test_what_is_logged_of_an_entry(tmp_path: Path) -> None:
    steps = _fit(tmp_path, _Scripted(), 4, callbacks=[ExpertLoadMonitor(every_n_steps=2)]).steps
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


def test_by_default_an_entry_ends_where_the_loggers_write(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ExpertLoadMonitor()
    _fit(tmp_path, _Scripted(), 5, callbacks=[monitor], logger=logger, log_every_n_steps=3)
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


def test_margins_that_are_infinite_are_left_out_of_their_mean_only() -> None:
    routes = TokenRoutes(
        ids_TK=torch.zeros(3, 1, dtype=torch.int64),
        weights_TK=torch.ones(3, 1),
        margin_T=torch.tensor([0.5, math.inf, 7.0]),
        entropy_T=torch.tensor([1.0, 0.5, 7.0]),
        valid_T=torch.tensor([True, True, False]),
    )
    record = dataclasses.replace(RECORDS[0], tokens=routes)
    sums = RoutingSums([4], [0], 1, torch.device("cpu"))
    sums.observe([record])
    sums.end_step(keep=True)
    (layer,) = sums.unpack(sums.pack())
    assert (layer.margin.item(), layer.entropy.item()) == (0.5, 0.75)
    assert sums.pack().abs().sum() == 0


class _TwoOptimizers(_Scripted):
    """Steps both in every batch; counts must not be taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: TokenBatch, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(p.parameters(), lr=0.1) for p in (self.moe, self.head)]


class _ManyEvaluations(_Scripted):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3)


@pytest.mark.parametrize("kind", [_TwoOptimizers, _ManyEvaluations])
def test_a_step_counts_once_with_two_optimizers_and_with_one_that_evaluates_often(
    tmp_path: Path, kind: type[_Scripted]
) -> None:
    _fit(tmp_path, kind(), 2, callbacks=[ExpertLoadMonitor(every_n_steps=50)])
    history = read_history(tmp_path / HISTORY)
    assert history["requested_0"].tolist() == [[4, 6, 2, 4]]
    assert history["kept_0"].tolist() == [[3, 3, 2, 3]]


def test_a_resumed_run_goes_on_with_the_history(tmp_path: Path) -> None:
    batches = make_batches([(8, 3)])  # an epoch is one step
    histories = []
    for folder, stops in ((tmp_path / "straight", (6,)), (tmp_path / "resumed", (5, 6))):
        path = None
        for stop in stops:
            trainer = make_trainer(
                folder,
                callbacks=[ExpertLoadMonitor(every_n_steps=2)],
                max_steps=stop,
                max_epochs=-1,
            )
            module = make_module(tiny_config(lb_loss_weight=0.1))
            loaders = make_loader(batches), make_loader(batches)
            trainer.fit(module, *loaders, ckpt_path=path, weights_only=False)
            trainer.save_checkpoint(folder / "last.ckpt")
            path = folder / "last.ckpt"
        histories.append(read_history(folder / HISTORY))
    straight, resumed = histories
    assert straight["steps"].tolist() == [1, 3, 5]
    # The first part ended with an entry of one step.
    assert resumed["steps"].tolist() == [1, 3, 4, 5]
    assert resumed["num_steps"].tolist() == [2, 2, 1, 1]
    np.testing.assert_array_equal(resumed["requested_0"][:2], straight["requested_0"][:2])
    np.testing.assert_array_equal(
        resumed["requested_0"][2:].sum(axis=0), straight["requested_0"][2]
    )


def test_entries_that_a_resumed_run_repeats_are_replaced(tmp_path: Path) -> None:
    rows = [{"steps": np.array(step), "num_steps": np.array(1)} for step in range(5)]
    write_history(tmp_path / HISTORY, rows)
    kept = entries_before(tmp_path / HISTORY, 3)
    assert [int(row["steps"]) for row in kept] == [0, 1, 2]
    assert entries_before(tmp_path / "none.npz", 3) == []


def test_a_new_run_in_the_same_folder_starts_a_new_history(tmp_path: Path) -> None:
    for _ in range(2):
        _fit(tmp_path, _Scripted(), 4, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [1, 3]


class _Fails(_Scripted):
    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 3:
            raise OSError("the disk is full")


def test_a_run_that_fails_leaves_its_history(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=2)
    with pytest.raises(OSError, match="the disk is full"):
        _fit(tmp_path, _Fails(), 5, callbacks=[monitor])
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [1, 3]


class _Killed(L.Callback):
    """Looks at the folder when training goes on after a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[list[int]] = []

    def on_train_batch_start(self, *_: object) -> None:
        path = self.folder / HISTORY
        self.found.append(read_history(path)["steps"].tolist() if path.exists() else [])


def test_the_history_is_written_at_every_validation(tmp_path: Path) -> None:
    killed = _Killed(tmp_path)
    callbacks = [ExpertLoadMonitor(every_n_steps=1), killed]
    trainer = make_trainer(tmp_path, callbacks=callbacks, val_check_interval=2)
    batches = make_batches([(8, 3)] * 5)
    trainer.fit(make_module(tiny_config()), make_loader(batches), make_loader(batches[:1]))
    assert killed.found == [[], [], [0, 1], [0, 1], [0, 1, 2, 3]]
    assert not list(tmp_path.glob("*.part"))


def test_a_damaged_history_is_named(tmp_path: Path) -> None:
    path = tmp_path / HISTORY
    with pytest.raises(FileNotFoundError):
        read_history(path)
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(ValueError, match=r"routing_history.npz is damaged"):
        read_history(path)
    np.savez(path, steps=np.arange(3), requested_0=np.ones((2, 4)))
    with pytest.raises(ValueError, match="don't have one row per step"):
        read_history(path)


class _ImageLogger(CSVLogger):
    """Takes pictures as W&B's logger does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.images: list[tuple[str, list[str]]] = []

    def log_image(self, key: str, images: list[str], step: int | None = None) -> None:
        self.images.append((key, [Path(image).name for image in images]))


def test_loggers_that_take_pictures_get_them(tmp_path: Path) -> None:
    board, images = TensorBoardLogger(tmp_path / "board"), _ImageLogger(tmp_path / "csv")
    plain = CSVLogger(tmp_path / "plain")
    monitor = ExpertLoadMonitor(every_n_steps=2)
    _fit(tmp_path, _Scripted(), 4, callbacks=[monitor], logger=[board, images, plain])
    pictures = ["expert_load", "expert_load_history"]
    assert images.images == [(f"train/{name}", [f"{name}.png"]) for name in pictures]
    assert all((tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG" for name in pictures)
    (events,) = Path(board.log_dir).glob("events*")
    assert all(f"train/{name}".encode() in events.read_bytes() for name in pictures)


@pytest.mark.parametrize(
    "options", [{"fast_dev_run": 2}, {"callbacks": [ExpertLoadMonitor(write_files=False)]}]
)
def test_nothing_is_written_where_it_is_not_wanted(
    tmp_path: Path, options: dict[str, object]
) -> None:
    _fit(tmp_path, _Scripted(), 2, **({"callbacks": [ExpertLoadMonitor()]} | options))
    assert not [path.name for path in tmp_path.rglob("*") if path.suffix in (".npz", ".png")]


def test_the_monitor_listens_during_fit_only_and_copies_are_not_listened_to(
    tmp_path: Path,
) -> None:
    module = _Scripted()
    _fit(tmp_path, module, 2, callbacks=[ExpertLoadMonitor(), ExpertLoadMonitor()])
    assert module.window.observers == []
    module.window.observers.append(print)
    copies = [copy.deepcopy(module.window), pickle.loads(pickle.dumps(module.window))]
    assert [window.observers for window in copies] == [[], []]
    assert module.window.observers == [print]


class _Gerrymandered(Recording):
    """Ten steps in which the busiest experts are those with least score."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        record = _record(
            [5000, 5000, 0, 0], [5000, 5000, 0, 0], [1000.0, 1000.0, 1500.0, 1500.0], 0
        )
        self.window.record([record])
        return self.loss_sum(batch)[0] * 1e-3


def test_gerrymandering_warns_once_and_is_logged(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, write_files=False)
    module = _Gerrymandered(bias_gamma=None)
    with pytest.warns(UserWarning, match="token gerrymandering at step 2: .*layer 0") as caught:
        steps = _fit(tmp_path, module, 6, callbacks=[monitor]).steps
    assert sum("gerrymandering" in str(warning.message) for warning in caught) == 1
    suspected = [step["train/gerrymandered_layers"] for step in steps]
    assert suspected == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_selection_bias_without_a_loss_is_not_suspected(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, write_files=False)
    steps = _fit(tmp_path, _Gerrymandered(bias_gamma=1e-3), 6, callbacks=[monitor]).steps
    assert steps[-1]["train/gerrymandered_layers"] == 0.0


def test_the_alarm_can_be_turned_off(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=1, alarm=False, write_files=False)
    steps = _fit(tmp_path, _Gerrymandered(bias_gamma=None), 6, callbacks=[monitor]).steps
    assert "train/gerrymandered_layers" not in steps[-1]


@pytest.mark.parametrize(
    "option",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 1.5},
        {"every_n_steps": True},
        {"recent_steps": 2.5},
        {"alarm": "maybe"},
        {"write_files": 1},
    ],
)
def test_options_of_another_kind_are_refused(option: dict[str, object]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"ExpertLoadMonitor: {name}={value!r} must be"):
        inspect.unwrap(ExpertLoadMonitor.__init__)(object.__new__(ExpertLoadMonitor), **option)


def test_layers_without_drops_or_traces_count_beside_those_that_have_them() -> None:
    routes = TokenRoutes(
        ids_TK=torch.zeros(2, 1, dtype=torch.int64),
        weights_TK=torch.ones(2, 1),
        margin_T=torch.tensor([0.5, 0.25]),
        entropy_T=torch.tensor([1.0, 0.0]),
        valid_T=torch.tensor([True, True]),
    )
    dropless = dataclasses.replace(RECORDS[2], lost_tokens=None)
    sums = RoutingSums([4, 4], [0], 1, torch.device("cpu"))
    sums.observe([dropless, dataclasses.replace(RECORDS[3], tokens=routes)])
    sums.end_step(keep=True)
    assert sums.drops
    first, second = sums.unpack(sums.pack())
    assert [first.lost_tokens.item(), second.lost_tokens.item()] == [0, 2]
    assert first.margin.isnan()
    assert (second.margin.item(), second.entropy.item()) == (0.375, 0.5)


def test_a_step_whose_scores_are_not_finite_has_no_balance_in_its_entry(tmp_path: Path) -> None:
    class Broken(Recording):
        def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
            scores = torch.full((4,), math.nan) if batch_idx == 1 else torch.ones(4)
            self.window.record([dataclasses.replace(RECORDS[0], score_sums_E=scores)])
            return self.loss_sum(batch)[0] * 1e-3

    steps = _fit(tmp_path, Broken(), 4, callbacks=[ExpertLoadMonitor(every_n_steps=2)]).steps
    history = read_history(tmp_path / HISTORY)
    assert np.isnan(history["balance_0"]).tolist() == [True, False]
    assert history["requested_0"].tolist() == [[8, 0, 0, 8]] * 2
    assert "train/balance_inner_product" not in steps[1]


@pytest.mark.parametrize(("every", "log_every"), [(4, 1), (3, 2)])
def test_loggers_get_an_entry_once_at_its_own_step(
    tmp_path: Path, every: int, log_every: int
) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ExpertLoadMonitor(every_n_steps=every)
    options = {"logger": logger, "log_every_n_steps": log_every, "max_epochs": 2}
    _fit(tmp_path, _Scripted(), 4, callbacks=[monitor], **options)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [int(row["step"]) for row in rows if row["train/dead_experts/layer_0"]]
    assert found == [step for step in range(8) if (step + 1) % every == 0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_entries_end_every_so_many_batches_with_two_optimizers(tmp_path: Path, every: int) -> None:
    module = _TwoOptimizers()
    trainer = make_trainer(
        tmp_path, callbacks=[ExpertLoadMonitor(every_n_steps=every)], max_epochs=3
    )
    trainer.fit(module, make_loader(make_batches([(8, 3)] * 2)))
    assert read_history(tmp_path / HISTORY)["num_steps"].tolist() == [every] * (6 // every)


def test_a_router_that_traced_before_goes_on_doing_so(tmp_path: Path) -> None:
    module = Recording()
    module.moe.router.trace = True
    _fit(tmp_path, module, 2, callbacks=[ExpertLoadMonitor(every_n_steps=1)])
    assert module.moe.router.trace


def test_nothing_of_a_run_is_written_by_the_next_one(tmp_path: Path) -> None:
    monitor, module = ExpertLoadMonitor(every_n_steps=1), make_module(tiny_config())
    batches = make_batches([(8, 3)])
    make_trainer(tmp_path / "a", callbacks=[monitor]).fit(
        module, make_loader(batches), make_loader(batches)
    )
    trainer = make_trainer(tmp_path / "b", callbacks=[monitor])
    trainer.validate(module, make_loader(batches), verbose=False)
    assert (tmp_path / "a" / HISTORY).exists()
    assert not (tmp_path / "b" / HISTORY).exists()


def test_nobody_listens_after_a_failed_run(tmp_path: Path) -> None:
    module = _Fails()
    with pytest.raises(OSError, match="the disk is full"):
        _fit(tmp_path, module, 5, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
    assert module.window.observers == []


def test_a_history_that_cannot_be_written_hides_no_error_and_ends_no_training(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "is_a_file"
    folder.write_text("")
    monitor = ExpertLoadMonitor(every_n_steps=1)
    message = "ExpertLoadMonitor: writing to .*is_a_file failed, training isn't affected"
    with pytest.warns(UserWarning, match=message), pytest.raises(OSError, match="the disk is full"):
        _fit(folder, _Fails(), 5, callbacks=[monitor])
    with pytest.warns(UserWarning, match=message):
        assert len(_fit(folder, _Scripted(), 5, callbacks=[monitor]).steps) == 5


def _resume(folder: Path, module: L.LightningModule, checkpoint: Path | None, steps: int) -> None:
    trainer = make_trainer(
        folder,
        callbacks=[ExpertLoadMonitor(every_n_steps=1)],
        max_steps=steps,
        max_epochs=-1,
    )
    loader = make_loader(make_batches([(8, 3)]))
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")


def test_a_run_resumed_on_fewer_ranks_goes_on_with_the_history(tmp_path: Path) -> None:
    _resume(tmp_path, Recording(), None, 2)
    of_two_ranks = read_history(tmp_path / HISTORY)
    of_two_ranks["rank_load_0"] = np.array([[5, 3], [6, 2]])
    np.savez(tmp_path / HISTORY, **of_two_ranks)
    _resume(tmp_path, Recording(), tmp_path / "last.ckpt", 3)
    loads = read_history(tmp_path / HISTORY)["rank_load_0"]
    # 11 tokens, each twice, on the one rank of the last step.
    assert loads.tolist() == [[5, 3], [6, 2], [22, -1]]


@pytest.mark.parametrize("kind", ["damaged", "foreign"])
def test_a_history_that_does_not_fit_is_replaced_on_resuming_and_not_even_read_before(
    tmp_path: Path, kind: str
) -> None:
    def spoil() -> None:
        if kind == "damaged":
            (tmp_path / HISTORY).write_bytes(b"PK\x03\x04 cut")
        else:
            np.savez(tmp_path / HISTORY, steps=np.arange(2), requested_0=np.ones((2, 8)))

    spoil()
    _resume(tmp_path, Recording(), None, 2)
    spoil()
    with pytest.warns(UserWarning, match=r"new history at step 2: .*routing_history\.npz is"):
        _resume(tmp_path, Recording(), tmp_path / "last.ckpt", 4)
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [2, 3]


def test_the_alarm_remembers_what_it_saw_before_a_resume(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="token gerrymandering at step 2"):
        _resume(tmp_path, _Gerrymandered(bias_gamma=None), None, 3)
    # Another warning would be an error.
    _resume(tmp_path, _Gerrymandered(bias_gamma=None), tmp_path / "last.ckpt", 6)


def test_a_long_history_is_bounded_and_keeps_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_history, "MAX_ENTRIES", 4)
    entries: list[routing_history.Entry] = []
    for step in range(11):
        entry = {
            "steps": np.array(step),
            "num_steps": np.array(1),
            "requested_0": np.array([step, 0]),
            "balance_0": np.array(float(step)),
            "margin_0": np.array(float(step)),
            "rank_load_0": np.array([step] if step else [0, 0]),
        }
        routing_history.append_entry(entries, entry)
    assert [int(entry["num_steps"]) for entry in entries] == [4, 2, 3, 2]
    assert [int(entry["steps"]) for entry in entries] == [3, 5, 8, 10]
    assert [int(entry["requested_0"][0]) for entry in entries] == [6, 9, 21, 19]
    assert [float(entry["margin_0"]) for entry in entries] == [3, 5, 8, 10]
    # Weighted by copies; step 0 has none and no say.
    means = [(1 + 4 + 9) / 6, (16 + 25) / 9, (36 + 49 + 64) / 21, (81 + 100) / 19]
    assert [float(entry["balance_0"]) for entry in entries] == pytest.approx(means)
    assert entries[0]["rank_load_0"].tolist() == [6, -1]
    assert entries[1]["rank_load_0"].tolist() == [9]
