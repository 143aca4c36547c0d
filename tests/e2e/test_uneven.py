"""Ranks with unequal numbers of batches end together, or say so together; they never wait for each other."""

from collections.abc import Iterator

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_moe import ExpertParallelStrategy, TokenBatch
from lightning_moe.nn import MoETransformer
from tests.kit.rank_trainers import (
    VOCAB_SIZE,
    Module,
    batches,
    config,
    join_lightning,
    loader,
    make_module,
    rank_trainer,
    whole_state,
)
from tests.kit.ranks import run_ranks


class _Stream(IterableDataset[TokenBatch]):
    def __init__(self, items: list[TokenBatch]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self.items)


def _stream(rank: int, world: int, num_batches: int) -> DataLoader[TokenBatch]:
    return DataLoader(_Stream(batches(rank, world, num_batches)), batch_size=None)


def _train_streams(rank: int, world: int, max_steps: int) -> int:
    join_lightning(rank, world)
    trainer = rank_trainer(world, max_steps=max_steps, max_epochs=2)
    train = _stream(rank, world, 5 if rank == 0 else 3)
    trainer.fit(make_module().double(), train, _stream(rank, world, 2 if rank == 0 else 4))
    return trainer.global_step


@pytest.mark.parametrize(("max_steps", "expected"), [(-1, 6), (4, 4)])
def test_streams_of_5_and_3_batches_end_together_after_3(max_steps: int, expected: int) -> None:
    assert run_ranks(_train_streams, 2, max_steps) == [expected, expected]


def _train_sized(rank: int, world: int, stage: str) -> str:
    join_lightning(rank, world)
    trainer = rank_trainer(world)
    uneven = DataLoader(batches(rank, world, 5 if rank == 0 else 3), batch_size=None)
    even = DataLoader(batches(rank, world, 2), batch_size=None)
    module = make_module().double()
    try:
        if stage == "train":
            trainer.fit(module, uneven)
        elif stage == "val":
            trainer.fit(module, even, uneven)
        else:
            trainer.test(module, uneven, verbose=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", ["train", "test"])
def test_loaders_of_unequal_length_are_refused_on_all_ranks(stage: str) -> None:
    for message in run_ranks(_train_sized, 2, stage):
        assert message.startswith(
            f"{stage} data loader 0 has 3 batches on one rank and 5 on another"
        )


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index % VOCAB_SIZE)


class _Predicts(Module):
    """Its step takes the batch only."""

    def predict_step(self, rows: torch.Tensor) -> list[int]:
        self.model.features(rows, valid_BS=torch.ones_like(rows, dtype=torch.bool))
        return rows[:, 0].tolist()


class _PredictsFromMany(_Predicts):
    def predict_step(self, rows: torch.Tensor, batch_idx: int, dataloader_idx: int) -> list[int]:
        return super().predict_step(rows)


def _predict(rank: int, world: int, num_loaders: int) -> list[int]:
    join_lightning(rank, world)
    trainer = rank_trainer(world, use_distributed_sampler=True)
    kind = _Predicts if num_loaders == 1 else _PredictsFromMany
    loaders = [DataLoader(_Rows(), batch_size=2) for _ in range(num_loaders)]
    found = trainer.predict(kind(config()).double(), loaders)
    outputs = [found] if num_loaders == 1 else found
    return [row for of_loader in outputs for batch in of_loader for row in batch]


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_predicting_9_samples_on_2_ranks_gives_9_results_per_loader(num_loaders: int) -> None:
    rows = sorted(row for found in run_ranks(_predict, 2, num_loaders) for row in found)
    assert rows == sorted([*range(9)] * num_loaders)


def _predict_logits(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    join_lightning(rank, world)
    mine = batches(rank, world, 3)
    whole = make_module().double().eval()
    with torch.no_grad():
        expected = [whole(batch.ids_BS)[0] for batch in mine]
    trainer = rank_trainer(world)
    return trainer.predict(make_module().double(), DataLoader(mine, batch_size=None)), expected


def test_the_module_predicts_the_logits_of_its_batches_on_2_ranks() -> None:
    for found, expected in run_ranks(_predict_logits, 2):
        torch.testing.assert_close(found, expected)


class _Late(L.LightningModule):
    """Builds its model once the ranks exist, on any device."""

    def __init__(self, *, meta: bool) -> None:
        super().__init__()
        self.meta = meta

    def configure_model(self) -> None:
        torch.manual_seed(4)
        with torch.device("meta" if self.meta else "cpu"):
            self.model = MoETransformer(config())

    def training_step(self, batch: TokenBatch) -> torch.Tensor:
        return self.model(batch.ids_BS)[0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _built(rank: int, world: int, ep: int, meta: bool) -> dict[str, torch.Tensor]:
    join_lightning(rank, world)
    torch.manual_seed(4)
    found = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found.append(whole_state(trainer, world, ep).weights)

    strategy = ExpertParallelStrategy(ep)
    trainer = rank_trainer(world, strategy, precision="32-true", max_steps=1, callbacks=[Look()])
    trainer.fit(_Late(meta=meta), loader(rank, world))
    return found[0]


def test_a_module_built_without_memory_gets_the_weights_of_one_with_memory_on_any_ranks() -> None:
    expected = run_ranks(_built, 1, 1, False)[0]
    assert expected["model.blocks.0.feed_forward.experts.w_down"].std() > 0
    for world, ep in ((1, 1), (2, 2), (4, 2)):
        got = run_ranks(_built, world, ep, True)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _everything(rank: int, world: int, folder: str) -> list[object]:
    join_lightning(rank, world)
    callbacks = [EarlyStopping("val/ce", patience=9), LearningRateMonitor()]
    trainer = rank_trainer(
        world,
        callbacks=callbacks,
        profiler="simple",
        logger=CSVLogger(folder),
        default_root_dir=folder,
        max_steps=-1,
        max_epochs=2,
        limit_train_batches=2,
        log_every_n_steps=1,
    )
    module = make_module().double()
    trainer.fit(module, loader(rank, world), loader(rank, world))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(rank, world), loader(rank, world))
    before = trainer.validate(module, loader(rank, world), verbose=False)[0]["val/ce"]
    test = trainer.test(module, loader(rank, world), verbose=False)[0]["test/ce"]
    return [trainer.global_step, before, test]


def test_fitting_twice_validating_and_testing_work_with_lightnings_own_callbacks(
    tmp_path: object,
) -> None:
    first, second = run_ranks(_everything, 2, str(tmp_path))
    assert first == second
    assert first[0] == 6
    assert first[1] == pytest.approx(first[2])


def _refused(rank: int, world: int) -> str:
    join_lightning(rank, world)
    plugin = MixedPrecision("16-mixed", "cpu")
    trainer = rank_trainer(world, precision=None, plugins=[plugin])
    try:
        trainer.fit(make_module(), loader(rank, world))
    except ValueError as error:
        return str(error)
    return "no error"


def test_mixed_float16_is_refused_on_all_ranks() -> None:
    for message in run_ranks(_refused, 2):
        assert "trainer.precision=16-mixed does not work with ExpertParallelStrategy" in message


def _fit_a_part(rank: int, world: int) -> str:
    join_lightning(rank, world)
    module = make_module()
    module.moe_layers[0].experts.keep_(range(2))
    try:
        rank_trainer(world, "ddp", precision=None).fit(module, loader(rank, world))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_spread_module_is_refused_by_a_strategy_that_needs_all_experts() -> None:
    for message in run_ranks(_fit_a_part, 2):
        assert "some of the module's experts only" in message
        assert "DDPStrategy needs all" in message
