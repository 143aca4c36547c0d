"""The load monitor's file of entries: when it is written, and how a later run goes on with it."""

from pathlib import Path

import lightning as L
import numpy as np
import pytest

from lightning_moe.callbacks import ExpertLoadMonitor, read_history
from tests.kit.modules import Recording, Scripted
from tests.kit.monitored import HISTORY, RECORDS, Failing, fit, resume
from tests.kit.runs import make_batches, make_loader, make_module, make_trainer, tiny_config


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


def test_a_new_run_in_the_same_folder_starts_a_new_history(tmp_path: Path) -> None:
    for _ in range(2):
        fit(tmp_path, Scripted(RECORDS), 4, callbacks=[ExpertLoadMonitor(every_n_steps=2)])
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [1, 3]


def test_a_run_that_fails_leaves_its_history(tmp_path: Path) -> None:
    monitor = ExpertLoadMonitor(every_n_steps=2)
    with pytest.raises(OSError, match="the disk is full"):
        fit(tmp_path, Failing(RECORDS), 5, callbacks=[monitor])
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


@pytest.mark.parametrize(
    "options", [{"fast_dev_run": 2}, {"callbacks": [ExpertLoadMonitor(write_files=False)]}]
)
def test_nothing_is_written_where_it_is_not_wanted(
    tmp_path: Path, options: dict[str, object]
) -> None:
    fit(tmp_path, Scripted(RECORDS), 2, **({"callbacks": [ExpertLoadMonitor()]} | options))
    assert not [path.name for path in tmp_path.rglob("*") if path.suffix in (".npz", ".png")]


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


def test_a_history_that_cannot_be_written_hides_no_error_and_ends_no_training(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "is_a_file"
    folder.write_text("")
    monitor = ExpertLoadMonitor(every_n_steps=1)
    message = "ExpertLoadMonitor: writing to .*is_a_file failed, training isn't affected"
    with pytest.warns(UserWarning, match=message), pytest.raises(OSError, match="the disk is full"):
        fit(folder, Failing(RECORDS), 5, callbacks=[monitor])
    with pytest.warns(UserWarning, match=message):
        assert len(fit(folder, Scripted(RECORDS), 5, callbacks=[monitor]).steps) == 5


def test_a_run_resumed_on_fewer_ranks_goes_on_with_the_history(tmp_path: Path) -> None:
    resume(tmp_path, Recording(), None, 2)
    of_two_ranks = read_history(tmp_path / HISTORY)
    of_two_ranks["rank_load_0"] = np.array([[5, 3], [6, 2]])
    np.savez(tmp_path / HISTORY, **of_two_ranks)
    resume(tmp_path, Recording(), tmp_path / "last.ckpt", 3)
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
    resume(tmp_path, Recording(), None, 2)
    spoil()
    with pytest.warns(UserWarning, match=r"new history at step 2: .*routing_history\.npz is"):
        resume(tmp_path, Recording(), tmp_path / "last.ckpt", 4)
    assert read_history(tmp_path / HISTORY)["steps"].tolist() == [2, 3]
