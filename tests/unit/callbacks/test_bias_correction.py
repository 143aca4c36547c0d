"""The expert bias moves once per optimizer step, by what the whole step asked for."""

import copy
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_moe import TokenBatch
from lightning_moe.callbacks import RouterBiasCorrection
from lightning_moe.nn import Routing
from tests.kit.by_hand import train_by_hand
from tests.kit.modules import Recording, Scripted, ScriptedTwoOptimizers
from tests.kit.records import routing_record
from tests.kit.runs import (
    GAMMA,
    SgdModule,
    assert_same,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)


def _records(counts: list[list[int]]) -> list[Routing]:
    return [routing_record(of_batch) for of_batch in counts]


def _bias_after(folder: Path, module: Recording, num_batches: int, **options: object) -> Tensor:
    trainer = make_trainer(folder, **({"callbacks": [RouterBiasCorrection()]} | options))
    trainer.fit(module, make_loader(make_batches([(8, 3)] * num_batches)))
    bias_E = module.moe.router.score_bias
    assert bias_E is not None
    assert bias_E.dtype == torch.float32
    return bias_E


def test_the_sum_of_the_step_decides_and_not_its_last_micro_batch(tmp_path: Path) -> None:
    # Sums 40, 24, 33, 31 around a mean of 32; the last micro-batch says the opposite.
    counts = [[14, 6, 9, 9], [12, 5, 9, 7], [10, 1, 14, 2], [4, 12, 1, 13]]
    bias_E = _bias_after(tmp_path, Scripted(_records(counts)), 4, accumulate_grad_batches=4)
    expected_E = torch.tensor([-GAMMA, GAMMA, -GAMMA, GAMMA])
    torch.testing.assert_close(bias_E, expected_E, rtol=0, atol=0)


def test_an_even_step_of_uneven_micro_batches_moves_nothing(tmp_path: Path) -> None:
    counts = [[8, 0, 0, 0], [0, 8, 0, 0], [0, 0, 8, 0], [0, 0, 0, 8]]
    bias_E = _bias_after(tmp_path, Scripted(_records(counts)), 4, accumulate_grad_batches=4)
    assert not bias_E.any()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_ten_steps_of_a_thousandth_lead_from_a_half_to_0_510(
    tmp_path: Path, precision: str
) -> None:
    module = Scripted(_records([[1, 9, 9, 9]] * 10))
    module.moe.router.score_bias[0] = 0.5
    bias_E = _bias_after(tmp_path, module, 10, precision=precision)
    expected_E = torch.tensor([0.510, -0.010, -0.010, -0.010])
    torch.testing.assert_close(bias_E, expected_E, rtol=0, atol=1e-6)


class _Lbfgs(Scripted):
    num_evaluations = 0

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        self.num_evaluations += 1
        return super().training_step(batch, batch_idx) * 1e3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_an_optimizer_that_evaluates_often_moves_the_bias_once_per_step(tmp_path: Path) -> None:
    module = _Lbfgs(_records([[1, 9, 9, 9]] * 2))
    bias_E = _bias_after(tmp_path, module, 2)
    assert module.num_evaluations > 4
    torch.testing.assert_close(bias_E, GAMMA * torch.tensor([2.0, -2, -2, -2]), rtol=0, atol=0)


def test_two_optimizers_of_one_step_move_the_bias_once(tmp_path: Path) -> None:
    bias_E = _bias_after(tmp_path, ScriptedTwoOptimizers(_records([[1, 9, 9, 9]] * 3)), 3)
    torch.testing.assert_close(bias_E, GAMMA * torch.tensor([3.0, -3, -3, -3]), rtol=0, atol=0)


def test_validation_and_sanity_check_leave_the_bias_alone(tmp_path: Path) -> None:
    module = make_module(tiny_config(bias_gamma=GAMMA))
    before = copy.deepcopy(module.model.state_dict())
    trainer = make_trainer(tmp_path)
    with torch.enable_grad():
        trainer.validate(module, make_loader(make_batches([(8, 8)] * 3)), verbose=False)
    torch.testing.assert_close(module.model.state_dict(), before, rtol=0, atol=0)
    assert not module.window.is_open


class _ValidatesBetween(L.Callback):
    """Runs forwards between the micro-batches of a step."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        pl_module.eval()
        for seed in range(3):
            pl_module.validation_step(make_batches([(8, 8)], seed=seed)[0], 0)
        pl_module.val_ce.reset()
        pl_module.train()


def test_forwards_between_micro_batches_are_not_counted(tmp_path: Path) -> None:
    config = tiny_config(bias_gamma=GAMMA)
    batches = make_batches([(8, 3), (1, 5), (7, 2), (2, 2)])
    runs = [
        run(tmp_path, make_module(config), batches, accumulate_grad_batches=2, callbacks=callbacks)
        for callbacks in ([], [_ValidatesBetween()])
    ]
    torch.testing.assert_close(runs[1].weights, runs[0].weights, rtol=0, atol=0)
    assert runs[1].steps == runs[0].steps


class _OwnCorrection(RouterBiasCorrection):
    """A user's variant."""


@pytest.mark.parametrize("kind", [RouterBiasCorrection, _OwnCorrection])
def test_a_correction_given_to_the_trainer_replaces_the_modules_own(
    tmp_path: Path, kind: type[RouterBiasCorrection]
) -> None:
    module = make_module(tiny_config(bias_gamma=GAMMA))
    run(tmp_path, module, make_batches([(8, 8)]), callbacks=[kind()])
    biases = [value for name, value in module.model.state_dict().items() if "score_bias" in name]
    assert torch.cat(biases).abs().max().item() == pytest.approx(GAMMA)


def test_the_bias_moves_although_the_step_is_skipped(tmp_path: Path) -> None:
    module = make_module(tiny_config(bias_gamma=GAMMA), _InfiniteLoss)
    before = copy.deepcopy(module.model.state_dict())
    got = run(tmp_path, module, make_batches([(8, 8)]), precision="32-true")
    assert got.steps[0]["train/skipped_steps"] == 1
    for name, value in got.weights.items():
        moved = not torch.equal(value, before[name])
        assert moved == name.endswith("score_bias"), name


class _InfiniteLoss(SgdModule):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float("inf")


def test_fitting_twice_goes_on_with_the_bias(tmp_path: Path) -> None:
    module = Scripted(_records([[1, 9, 9, 9]] * 2))
    for expected in (2, 4):
        bias_E = _bias_after(tmp_path, module, 2)
        steps_E = torch.tensor([1.0, -1, -1, -1]) * expected
        torch.testing.assert_close(bias_E, GAMMA * steps_E, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("gating", "groups"),
    [
        ("softmax", {"n_group": 2, "topk_group": 1}),
        ("topk_softmax", {}),
        ("sigmoid", {"n_group": 2, "topk_group": 1}),
    ],
)
@pytest.mark.parametrize("centered", [False, True])
def test_the_bias_follows_the_rule_under_every_gate_with_groups_padding_and_recomputation(
    tmp_path: Path, gating: str, groups: dict[str, int], centered: bool
) -> None:
    router = {"gating_function": gating, "bias_gamma": GAMMA, "bias_centering": centered, **groups}
    router |= {"top_k": 1, "lb_loss_scope": "sequence"}
    batches = make_batches([(8, 3), (0, 5), (7, 2), (2, 2)])
    module = make_module(tiny_config(recompute="block", **router))
    for layer in module.moe_layers:
        layer.router.score_bias += torch.tensor([0.02, 0.01, 0.03, 0.01])
    expected = train_by_hand(module, [batches[:2], batches[2:]])
    assert_same(run(tmp_path, module, batches, accumulate_grad_batches=2), expected)
    biases = [bias for name, bias in expected.weights.items() if name.endswith("score_bias")]
    means = [abs(bias.double().mean().item()) for bias in biases]
    assert max(means) < 1e-8 if centered else min(means) > 1e-3


def test_a_bias_without_a_gamma_is_used_and_stays(tmp_path: Path) -> None:
    module = make_module(tiny_config(score_correction_bias=True))
    for layer in module.moe_layers:
        layer.router.score_bias += torch.tensor([3.0, 0.0, 3.0, 0.0])
    run(tmp_path, module, make_batches([(8, 8)] * 2))
    for layer in module.moe_layers:
        assert layer.router.score_bias.tolist() == [3.0, 0.0, 3.0, 0.0]
    requested = module.window.last.requested
    assert all((counts[[1, 3]] == 0).all() and counts.sum() == 32 for counts in requested)
