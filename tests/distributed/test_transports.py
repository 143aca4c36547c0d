"""Transports: one registered here trains, and fixed shapes have room for the micro-batches of the data."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe import StaticDispatch, TokenBatch, TokenDataModule
from lightning_moe.config import MoEConfig
from lightning_moe.config.data import DataConfig
from lightning_moe.parallel import (
    AllToAllDispatcher,
    AxisGroup,
    Ledger,
    Transport,
    register_transport,
)
from tests.kit.rank_runs import OPTIMIZERS, Recorded, batches, config, fit, parallel
from tests.kit.rank_trainers import join_lightning, rank_trainer
from tests.kit.ranks import run_ranks

ALONE = AxisGroup("ep", (0,), 0, None, Ledger())


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubled(Transport):
    """All-to-all of rows times `factor`, which it takes back: exact for powers of two."""

    factor: float = 1.0

    def build(self, group: AxisGroup, layer: MoEConfig, larger: Any = None) -> AllToAllDispatcher:
        return DoublingDispatcher(group, self.factor)


class DoublingDispatcher(AllToAllDispatcher):
    def __init__(self, group: AxisGroup, factor: float) -> None:
        super().__init__(group)
        self.factor, self.num_calls = factor, 0

    def dispatch(self, x_TW: Tensor, *rest: Any) -> Any:
        self.num_calls += 1
        return super().dispatch(x_TW * self.factor, *rest)

    def receive(self, flight: Any) -> Any:
        sent = super().receive(flight)
        return replace(sent, rows_RW=sent.rows_RW / self.factor)


def _losses(rank: int, world: int, dispatcher: Any) -> tuple[list[float], int]:
    register_transport("doubled", Doubled)
    module = Recorded(config(), OPTIMIZERS["adamw"])
    fit(
        rank,
        world,
        module,
        batches(rank, world, steps=2),
        strategy=parallel(2, dispatcher=dispatcher),
    )
    calls = [getattr(layer.dispatcher, "num_calls", 0) for layer in module.moe_layers]
    return module.losses, sum(calls)


def test_a_transport_that_is_registered_here_trains_by_its_name_and_by_its_options() -> None:
    expected = run_ranks(_losses, 2, "all_to_all")
    for dispatcher in ("doubled", Doubled(factor=2.0)):
        for (losses, calls), (wanted, _) in zip(
            run_ranks(_losses, 2, dispatcher), expected, strict=True
        ):
            assert losses == wanted
            assert calls == 2 * 2  # layers, steps


def test_options_by_name_fill_the_dataclass() -> None:
    options: dict[str, Any] = {"capacity_factor": 2.0, "overflow": "weight", "warmup_tokens": 9}
    wanted = StaticDispatch(**options)
    assert parallel(dispatcher="static", **options).transport == wanted
    assert parallel(dispatcher=wanted).transport is wanted
    assert parallel(dispatcher="static").transport == StaticDispatch()


def test_equal_capacities_reuse_the_same_tensors() -> None:
    layer = MoEConfig(num_experts=4, hidden_size=8)
    dispatcher = StaticDispatch(capacity_factor=1.0, warmup_tokens=30).build(ALONE, layer)

    def counts(num_tokens: int) -> Tensor:
        x_TW = torch.zeros(num_tokens, 5)
        ids_TK = torch.zeros(num_tokens, 1, dtype=torch.int64)
        flight = dispatcher.dispatch(x_TW, ids_TK, torch.ones(num_tokens, 1), 4)
        return dispatcher.receive(flight).counts_L

    first = counts(30)
    assert first.tolist() == [8] * 4  # a quarter of 30, rounded up to 8
    assert counts(3) is first
    dispatcher.warmup(32, first.device)
    assert counts(32) is first
    dispatcher.warmup(33, first.device)
    assert counts(33).tolist() == [16] * 4
    dispatcher.warmup(30, first.device)
    assert counts(30) is first


def _with_a_larger_batch(
    rank: int, world: int, number: int, warmup_tokens: int | None
) -> tuple[Any, ...]:
    """Two micro-batches a step of 2 x 7 tokens; that with `number` has 3 x 7 on the second rank."""
    module = Recorded(config(), OPTIMIZERS["sgd"])
    data = batches(rank, world, steps=3, accumulate=2)
    if rank == 1:
        larger = data[number]
        data[number] = TokenBatch(
            ids_BS=larger.ids_BS[[0, 1, 0]], labels_BS=larger.labels_BS[[0, 1, 0]]
        )
    strategy = parallel(2, dispatcher=StaticDispatch(warmup_tokens=warmup_tokens))
    with pytest.raises(RuntimeError) as caught:
        fit(rank, world, module, data, strategy=strategy, accumulate_grad_batches=2)
    return str(caught.value), module.trainer.global_step, len(module.losses)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_larger_batch_of_one_rank_ends_all_ranks_before_its_step_moves_a_weight(
    number: int,
) -> None:
    for warmup_tokens in (14, None):
        first, second = run_ranks(_with_a_larger_batch, 2, number, warmup_tokens)
        assert first == second
        message, steps, losses = first
        assert "a micro-batch of 21 tokens is larger than the 14" in message
        assert "strategy.warmup_tokens" in message
        assert steps == losses == number // 2


class Rows(Dataset[TokenBatch]):
    """Rows of eleven tokens, which the loader's `collate_fn` makes batches of."""

    sequence_length = 11

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Tensor:
        return torch.full((11,), row)


def _batch(rows: list[Tensor]) -> TokenBatch:
    return TokenBatch(ids_BS=torch.stack(rows), labels_BS=torch.stack(rows))


def _room(rank: int, world: int) -> dict[str, int]:
    """Tokens that the layers have room for, by where the training data come from."""
    data: dict[str, Any] = {
        "data module": TokenDataModule(DataConfig(batch_size=3, sequence_length=16)),
        "loader": DataLoader(Rows(), batch_size=2, collate_fn=_batch),
        "first batch": DataLoader(batches(0, 1, steps=2), batch_size=None),
        "option": DataLoader(batches(0, 1, steps=2), batch_size=None),
    }
    found = {}
    for name, source in data.items():
        module = Recorded(config(), OPTIMIZERS["sgd"])
        warmup_tokens = 99 if name == "option" else None
        strategy = parallel(1, dispatcher="static", warmup_tokens=warmup_tokens)
        join_lightning(rank, world)
        rank_trainer(1, strategy, max_steps=1, limit_val_batches=0).fit(module, source)
        (found[name],) = {layer.dispatcher.max_tokens for layer in module.moe_layers}
    return found


def test_fixed_shapes_have_room_for_the_micro_batches_of_the_data() -> None:
    (found,) = run_ranks(_room, 1)
    # 8 sequences of 7 tokens in the first batch.
    assert found == {"data module": 3 * 16, "loader": 2 * 11, "first batch": 8 * 7, "option": 99}
