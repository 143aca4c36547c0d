"""A run that is resumed from a checkpoint sees exactly the batches it had still to see."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.kit.data_runs import Recorder, Rows, SaveAt, data_trainer, make_data

# Lightning advises on workers, logging intervals and rates of saving that tiny runs do not have.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

NUM_ROWS = 7  # three batches of two in an epoch, one row left over


def train(
    folder: Path, *, num_workers: int = 0, ckpt_path: Path | None = None, **options: object
) -> list[Rows]:
    module = Recorder()
    data = make_data(folder, NUM_ROWS, num_workers=num_workers)
    data_trainer(folder, **options).fit(module, data, ckpt_path=ckpt_path)
    return module.trained


def check_every_resume(folder: Path, hook: str, *, num_workers: int = 0, **options: object) -> None:
    """Train once, saving at `hook`; every checkpoint must continue as the run itself did."""
    straight = train(folder, num_workers=num_workers, callbacks=[SaveAt(hook, folder)], **options)
    checkpoints = list(folder.glob(f"{hook}-*.ckpt"))
    assert len(checkpoints) > 1
    for path in checkpoints:
        num_done = int(path.stem.removeprefix(f"{hook}-"))
        resumed = train(folder, num_workers=num_workers, ckpt_path=path, **options)
        assert resumed == straight[num_done:], f"resumed after {num_done} batches"


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_steps": 8},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_steps": 5, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "limit_train_batches": 2},
        {"max_steps": 6, "limit_train_batches": 2},
        {"max_epochs": 2, "val_check_interval": 2},
        {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": 3, "overfit_batches": 2},
    ],
    ids=str,
)
def test_resume_equals_the_uninterrupted_run_exactly(
    tmp_path: Path, hook: str, options: dict[str, int]
) -> None:
    check_every_resume(tmp_path, hook, **options)


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 5}], ids=str)
def test_resume_with_two_workers_equals_the_uninterrupted_run_exactly(
    tmp_path: Path, limit: dict[str, int]
) -> None:
    check_every_resume(tmp_path, "on_train_batch_end", num_workers=2, **limit)


def test_epochs_come_in_different_orders_and_cover_different_rows(tmp_path: Path) -> None:
    batches = train(tmp_path, max_epochs=3)
    assert len(batches) == 9
    epochs = [tuple(batches[i : i + 3]) for i in (0, 3, 6)]
    assert len(set(epochs)) == 3
    assert all(len({row for batch in epoch for row in batch}) == 6 for epoch in epochs)


def test_two_workers_and_none_train_on_the_same_batches(tmp_path: Path) -> None:
    assert train(tmp_path, num_workers=2, max_epochs=2) == train(tmp_path, max_epochs=2)


@pytest.mark.parametrize("first_steps", [2, 3, 4])
def test_a_finished_run_can_be_made_longer(tmp_path: Path, first_steps: int) -> None:
    straight = train(tmp_path, max_steps=8)
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    options = {"enable_checkpointing": True, "limit_val_batches": 0, "callbacks": [saver]}
    first = train(tmp_path, max_steps=first_steps, **options)
    longer = train(tmp_path, max_steps=8, ckpt_path=tmp_path / "last.ckpt")
    assert first + longer == straight


def test_a_resumed_run_can_be_resumed_again(tmp_path: Path) -> None:
    straight = train(tmp_path, max_steps=9)
    saved = []
    for number, num_steps in enumerate((3, 6, 9)):
        folder = tmp_path / str(number)
        folder.mkdir()
        saver = SaveAt("on_train_epoch_end", folder)
        resume_from = next((tmp_path / str(number - 1)).glob("*.ckpt")) if number else None
        saved += train(tmp_path, max_steps=num_steps, ckpt_path=resume_from, callbacks=[saver])
        # Each run ends with an epoch; the last checkpoint it wrote is the one to go on from.
        newest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        for path in folder.glob("*.ckpt"):
            if path != newest:
                path.unlink()
    assert saved == straight


def test_a_checkpoint_of_another_seed_is_refused_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, callbacks=[SaveAt("on_train_batch_end", tmp_path)])
    data = make_data(tmp_path, NUM_ROWS, seed=1)
    with pytest.raises(ValueError, match=r"written with data.seed=0, this run has 1"):
        data_trainer(tmp_path, max_steps=4).fit(
            Recorder(), data, ckpt_path=tmp_path / "on_train_batch_end-2.ckpt"
        )


def test_fit_twice_with_one_data_module_starts_anew(tmp_path: Path) -> None:
    data = make_data(tmp_path, NUM_ROWS)
    runs = []
    for _ in range(2):
        module = Recorder()
        data_trainer(tmp_path, max_epochs=1).fit(module, data)
        runs.append(module.trained)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 3
