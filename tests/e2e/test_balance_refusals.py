"""What balance scopes beyond a micro-batch refuse inside the Trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moe import TokenBatch, step_router_losses
from lightning_moe.callbacks import NonFiniteGuard
from tests.kit.balanced import LENGTHS, Balanced, Windowless, fit
from tests.kit.runs import (
    make_batches,
    make_loader,
    make_trainer,
)


@pytest.mark.parametrize("scope", ["accumulated", "lagged", "exact"])
def test_scopes_of_a_step_are_refused_without_a_window(tmp_path: Path, scope: str) -> None:
    message = f"lb_loss_scope='{scope}' needs the counts .*let Windowless inherit .*StepHooks"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, Windowless(scope), callbacks=[])


class _NoRouting(Balanced):
    routing_step = None


def test_exact_is_refused_without_a_routing_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'exact' needs _NoRouting to have a method routing_step"):
        fit(tmp_path, _NoRouting())


class _Manual(Balanced):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_exact_is_refused_with_manual_optimization(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match="_Manual optimizes manually; use automatic"):
        trainer.fit(_Manual(), make_loader(make_batches(LENGTHS)))


class _TakesAnIterator(Balanced):
    def training_step(self, dataloader_iter: Iterator[object]) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_exact_is_refused_where_the_step_fetches_its_batches_itself(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"_TakesAnIterator.training_step takes a datal"):
        fit(tmp_path, _TakesAnIterator())


class _Lbfgs(Balanced):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def test_lagged_is_refused_where_a_step_calls_training_step_repeatedly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'lagged' can't work with LBFGS"):
        fit(tmp_path, _Lbfgs("lagged"))


class _KeepsRecords(Balanced):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        auxiliary = step_router_losses(self, [routing])
        return self.window.add(total + auxiliary.total, num_tokens)


@pytest.mark.parametrize("scope", ["accumulated", "lagged", "exact"])
def test_a_micro_batch_added_without_its_records_is_refused(tmp_path: Path, scope: str) -> None:
    with pytest.raises(ValueError, match=r"called with 1 routing records, and 0 were added"):
        fit(tmp_path, _KeepsRecords(scope), callbacks=[NonFiniteGuard()])


class _AddsNothing(Balanced):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        return (total + step_router_losses(self, [routing]).total) / num_tokens


@pytest.mark.parametrize("scope", ["accumulated", "lagged", "exact"])
def test_a_micro_batch_that_is_never_added_is_refused(tmp_path: Path, scope: str) -> None:
    with pytest.raises(RuntimeError, match=f"'{scope}' needs every micro-batch .* was not added"):
        fit(tmp_path, _AddsNothing(scope), callbacks=[])


class _BalancesInValidation(Balanced):
    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        step_router_losses(self, [self.loss_sum(batch)[2]])


def test_scopes_of_a_step_are_refused_outside_of_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match=r"'lagged' is about optimizer steps: call .* in train"):
        trainer.validate(_BalancesInValidation("lagged"), make_loader(make_batches(LENGTHS)))


def test_one_record_per_layer_is_needed() -> None:
    with pytest.raises(ValueError, match="0 routing records for 1 MoE layers"):
        step_router_losses(Balanced(), [])
