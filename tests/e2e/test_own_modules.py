"""MoE layers in a user's own LightningModule: the same exactness, or a clear refusal."""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_moe import StepWindow, TokenBatch
from lightning_moe.callbacks import ExpertLoadMonitor, NonFiniteGuard, RouterBiasCorrection
from lightning_moe.step import begin_steps, close_window
from tests.kit.modules import Adding, Manual, OwnModule, Recording
from tests.kit.runs import (
    GAMMA,
    LEARNING_RATE,
    NUM_EXPERTS,
    make_batches,
    make_loader,
    make_trainer,
)

LENGTHS = [(8, 3), (1, 5), (7, 2), (2, 2)]
MeanLoss = Callable[[OwnModule, list[TokenBatch]], Tensor]


def _fit(folder: Path, module: OwnModule, **options: object) -> dict[str, Tensor]:
    options = {"callbacks": [RouterBiasCorrection()], "precision": "64-true"} | options
    trainer = make_trainer(folder, **options)
    trainer.fit(module, make_loader(make_batches(LENGTHS)))
    return module.state_dict()


def _over_tokens(module: OwnModule, batches: list[TokenBatch]) -> Tensor:
    parts = [module.loss_sum(batch) for batch in batches]
    return sum(part[0] for part in parts) / sum(part[1] for part in parts)


def _over_micro_batches(module: OwnModule, batches: list[TokenBatch]) -> Tensor:
    parts = [module.loss_sum(batch) for batch in batches]
    return sum(part[0] / part[1] for part in parts) / len(parts)


def _by_hand(mean: MeanLoss, *, max_norm: float = float("inf")) -> dict[str, Tensor]:
    """Two steps of two micro-batches with autograd alone."""
    module = OwnModule().double()
    batches = make_batches(LENGTHS)
    for window in (batches[:2], batches[2:]):
        loss = mean(module, window)
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        scale = min(1.0, max_norm / (norm.item() + 1e-6))
        counts_E = torch.zeros(NUM_EXPERTS)
        for batch in window:
            counts_E += module.loss_sum(batch)[2].requested_E
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(LEARNING_RATE * scale * gradient)
            module.moe.router.score_bias += GAMMA * torch.sign(counts_E.mean() - counts_E)
    return module.state_dict()


def _assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_sums_given_to_a_window_are_divided_by_the_tokens_of_the_step(tmp_path: Path) -> None:
    _assert_equal(_fit(tmp_path, Adding(), accumulate_grad_batches=2), _by_hand(_over_tokens))


class _WithoutHooks(OwnModule):
    """Can't inherit the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.window = StepWindow(7)

    training_step = Adding.training_step

    def on_train_start(self) -> None:
        begin_steps(self)


class _StepsByItself(Adding):
    """The usual override for a warm-up of one's own, without super()."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: object, closure: object
    ) -> None:
        optimizer.step(closure=closure)


@pytest.mark.filterwarnings("ignore:When using `Trainer.accumulate_grad_batches != 1")
@pytest.mark.parametrize("module", [Adding, _WithoutHooks, _StepsByItself])
@pytest.mark.parametrize("callbacks", [[], [NonFiniteGuard]])
def test_steps_are_closed_with_and_without_callbacks_that_read_them(
    tmp_path: Path, module: type[OwnModule], callbacks: list[type[L.Callback]]
) -> None:
    options = {"accumulate_grad_batches": 2, "callbacks": [kind() for kind in callbacks]}
    got = _fit(tmp_path, module(), **options)
    expected = _by_hand(_over_tokens)
    # Nothing moves the bias then.
    expected["moe.router.score_bias"] = torch.zeros(NUM_EXPERTS)
    _assert_equal(got, expected)


def test_clipping_sees_divided_gradients(tmp_path: Path) -> None:
    got = _fit(tmp_path, Adding(), accumulate_grad_batches=2, gradient_clip_val=0.05)
    _assert_equal(got, _by_hand(_over_tokens, max_norm=0.05))


class _FirstGradient(L.Callback):
    """What the first of the Trainer's callbacks sees of the head's gradient."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: OwnModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.seen = [*getattr(self, "seen", []), pl_module.head.bias.grad.clone()]


def test_manual_optimization_is_divided_by_the_tokens_of_the_step(tmp_path: Path) -> None:
    first, automatic = _FirstGradient(), _FirstGradient()
    got = _fit(tmp_path, Manual(2), callbacks=[first, RouterBiasCorrection()])
    _assert_equal(got, _by_hand(_over_tokens))
    options = {"accumulate_grad_batches": 2, "callbacks": [automatic, RouterBiasCorrection()]}
    _fit(tmp_path, Adding(), **options)
    torch.testing.assert_close(first.seen, automatic.seen, rtol=1e-12, atol=1e-12)


def test_recording_leaves_a_mean_loss_alone_and_still_moves_the_bias(tmp_path: Path) -> None:
    got = _fit(tmp_path, Recording(), accumulate_grad_batches=2)
    _assert_equal(got, _by_hand(_over_micro_batches))
    assert got["moe.router.score_bias"].any()


class _TwoForwards(Adding):
    """Calls the layer twice before one backward, as preference losses do."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        losses = []
        for row in range(2):
            ids_BS, labels_BS = batch.ids_BS[row : row + 1], batch.labels_BS[row : row + 1]
            losses.append(super().training_step(TokenBatch(ids_BS=ids_BS, labels_BS=labels_BS), 0))
        return torch.stack(losses).sum()


def test_two_forwards_before_one_backward_both_count(tmp_path: Path) -> None:
    _assert_equal(_fit(tmp_path, _TwoForwards(), accumulate_grad_batches=2), _by_hand(_over_tokens))


class _ClosesItself(Manual):
    """Clips by hand, so it divides by hand first."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> None:
        total, num_tokens, routing = self.loss_sum(batch)
        self.manual_backward(self.window.add(total, num_tokens, [routing]))
        if batch_idx % 2:
            close_window(self)
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def test_a_window_closed_by_hand_before_clipping_is_not_divided_again(tmp_path: Path) -> None:
    _assert_equal(_fit(tmp_path, _ClosesItself(2)), _by_hand(_over_tokens, max_norm=0.05))


class _ForgetsSuper(Adding):
    def on_train_start(self) -> None:
        pass


class _ForgetsSuperManually(Manual):
    def on_train_start(self) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "accumulate"),
    [(_ForgetsSuper, 1), (_ForgetsSuper, 2), (lambda: _ForgetsSuperManually(2), 1)],
)
@pytest.mark.parametrize("callback", [None, NonFiniteGuard, RouterBiasCorrection])
def test_sums_that_nothing_divides_are_refused_at_the_first_step(
    tmp_path: Path,
    module: Callable[[], OwnModule],
    accumulate: int,
    callback: type[L.Callback] | None,
) -> None:
    callbacks = [] if callback is None else [callback()]
    with pytest.raises(RuntimeError, match="nothing has closed the module's StepWindow"):
        _fit(
            tmp_path, module(), callbacks=callbacks, max_steps=1, accumulate_grad_batches=accumulate
        )


@pytest.mark.parametrize("callback", [RouterBiasCorrection, ExpertLoadMonitor])
def test_callbacks_refuse_a_module_that_records_nothing(
    tmp_path: Path, callback: type[L.Callback]
) -> None:
    with pytest.raises(
        RuntimeError, match=r"1 layers, 0 records; let the module inherit lightning_moe.StepHooks"
    ):
        _fit(tmp_path, OwnModule(), callbacks=[callback()])


class _RecordsTwice(Recording):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        self.window.record([routing, routing])
        return total / num_tokens


def test_callbacks_refuse_more_records_than_layers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="1 layers, 2 records"):
        _fit(tmp_path, _RecordsTwice())


class _Dense(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.moe = torch.nn.Linear(6, 6)


@pytest.mark.parametrize("callback", [RouterBiasCorrection, ExpertLoadMonitor])
def test_callbacks_refuse_a_module_without_moe_layers(
    tmp_path: Path, callback: type[L.Callback]
) -> None:
    name = callback.__name__
    with pytest.raises(ValueError, match=rf"{name} found no MoE layer in _Dense; remove"):
        _fit(tmp_path, _Dense(), callbacks=[callback()])


def test_bias_correction_refuses_layers_without_a_gamma(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no layer has model.moe.router.bias_gamma; set it"):
        _fit(tmp_path, OwnModule(bias_gamma=None))


class _WrongWindow(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.window = [StepWindow()]


def test_a_window_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"_WrongWindow.window must be a lightning_moe.StepWindow"):
        _fit(tmp_path, _WrongWindow())
