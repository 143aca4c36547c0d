"""Balance scopes beyond a micro-batch inside the Trainer: what they compute, and what looking ahead leaves alone."""

from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe import StepWindow, TokenBatch, step_router_losses
from lightning_moe.callbacks import NonFiniteGuard
from lightning_moe.nn import Routing
from tests.kit.balanced import LENGTHS, Balanced, Windowless, fit
from tests.kit.modules import OwnModule
from tests.kit.runs import (
    GAMMA,
    LEARNING_RATE,
    VOCAB_SIZE,
    Run,
    SgdModule,
    assert_same,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)

EXACT = {"lb_loss_scope": "exact", "lb_loss_weight": 2.0, "bias_gamma": 0.01}
JITTER = EXACT | {"jitter_eps": 0.3}


def _run(folder: Path, kind: type[SgdModule] = SgdModule, **options: object) -> Run:
    module = make_module(tiny_config(**JITTER), kind)
    return run(folder, module, make_batches(LENGTHS), accumulate_grad_batches=4, **options)


def test_the_forwards_ahead_draw_the_noise_of_training_and_leave_random_numbers_alone(
    tmp_path: Path,
) -> None:
    states = []
    for scope in ("exact", "sequence"):
        torch.manual_seed(1)
        module = make_module(tiny_config(**(JITTER | {"lb_loss_scope": scope})))
        run(tmp_path, module, make_batches(LENGTHS), accumulate_grad_batches=4)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class _OtherNoise(SgdModule):
    def routing_step(self, batch: TokenBatch, batch_idx: int) -> list[Routing]:
        return super().routing_step(batch, batch_idx + 7)


def test_other_noise_ahead_than_in_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"MoE layer 0 was to route .* routing_step must repeat"):
        _run(tmp_path, _OtherNoise)


def test_validation_within_a_step_changes_nothing(tmp_path: Path) -> None:
    expected = _run(tmp_path)
    assert_same(_run(tmp_path, val_check_interval=3), expected, tolerance=0.0)


def test_a_shortened_epoch_is_looked_ahead_no_further_than_its_end(tmp_path: Path) -> None:
    config = tiny_config(**JITTER)
    short = run(tmp_path, make_module(config), make_batches(LENGTHS[:3]), accumulate_grad_batches=4)
    assert_same(_run(tmp_path, limit_train_batches=3), short, tolerance=0.0)


class _Position(L.Callback):
    """What a checkpoint in the middle of a step says about the loader, and what the loader has given."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        saved, given = loop["combined_loader"][0]["given"], trainer.train_dataloader.given
        self.seen = [*getattr(self, "seen", []), (trainer.fit_loop.batch_idx + 1, saved, given)]


class _Counting(DataLoader[TokenBatch]):
    given = 0

    def __iter__(self) -> Iterator[TokenBatch]:
        for batch in super().__iter__():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


def test_a_checkpoint_within_a_step_keeps_the_position_of_training(tmp_path: Path) -> None:
    position = _Position()
    trainer = make_trainer(tmp_path, accumulate_grad_batches=4, callbacks=[position])
    loader = _Counting(make_batches(LENGTHS), batch_size=None, collate_fn=lambda batch: batch)
    trainer.fit(make_module(tiny_config(**EXACT)), loader, make_loader(make_batches([(8, 3)])))
    assert position.seen == [(1, 1, 4), (2, 2, 4), (3, 3, 4), (4, 4, 4), (5, 5, 6), (6, 6, 6)]


def _by_hand(scope: str) -> dict[str, Tensor]:
    """Steps of two micro-batches: descent on the mean cross-entropy, plus twice the formula of the balance loss."""
    module = OwnModule(lb_loss_weight=2.0, lb_loss_scope=scope).double()
    batches = make_batches(LENGTHS)
    previous_E = None
    for window in (batches[0:2], batches[2:4], batches[4:6]):
        parts = [module.loss_sum(batch) for batch in window]
        counts = [routing.requested_E for _, _, routing in parts]
        whole_E = counts[0] + counts[1]
        chosen = {
            "accumulated": [counts[0], whole_E],
            "lagged": counts if previous_E is None else [previous_E] * 2,
            "exact": [whole_E] * 2,
        }[scope]
        loss = sum(total for total, _, _ in parts)
        for counts_E, (_, _, routing) in zip(chosen, parts, strict=True):
            loss = loss + 2 * 4 * (counts_E * routing.score_sums_E).sum() / counts_E.sum()
        parameters = list(module.parameters())
        gradients = torch.autograd.grad(loss / sum(n for _, n, _ in parts), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(LEARNING_RATE * gradient)
            mean = whole_E.float().mean()
            module.moe.router.score_bias += GAMMA * torch.sign(mean - whole_E)
        previous_E = whole_E
    return module.state_dict()


@pytest.mark.parametrize("scope", ["accumulated", "lagged", "exact"])
def test_a_users_own_module_trains_like_the_formulas(tmp_path: Path, scope: str) -> None:
    got = fit(tmp_path, Balanced(scope))
    torch.testing.assert_close(got, _by_hand(scope), rtol=1e-12, atol=1e-12)


class _Stream(IterableDataset[TokenBatch]):
    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(make_batches(LENGTHS))


def test_a_loader_without_length_is_looked_ahead_as_well(tmp_path: Path) -> None:
    got = fit(tmp_path, Balanced(), _Stream())
    torch.testing.assert_close(got, _by_hand("exact"), rtol=1e-12, atol=1e-12)


def test_jitter_of_a_users_own_module_is_drawn_equal_ahead(tmp_path: Path) -> None:
    jittered = fit(tmp_path, Balanced(jitter_eps=0.3))
    assert not torch.allclose(jittered["moe.router.weight"], _by_hand("exact")["moe.router.weight"])


class _HeadAfterwards(Balanced):
    """Looks ahead before the head has been used in this step; the forward ahead uses it."""

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        # Lightning's own autocast keeps no cast weights; this one does.
        with torch.autocast("cpu", torch.bfloat16):
            return self._loss(batch)

    def _loss(self, batch: TokenBatch) -> Tensor:
        y_BSD, routing = self.moe(self.embedding(batch.ids_BS), batch.labels_BS != -100)
        auxiliary = step_router_losses(self, [routing])
        logits_TV = self.head(y_BSD).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits_TV, batch.labels_BS.flatten(), reduction="sum")
        return self.window.add(loss + auxiliary.total, routing.num_tokens, [routing])


def test_a_forward_ahead_takes_no_gradient_from_weights_under_autocast(tmp_path: Path) -> None:
    gradients = []
    for scope in ("exact", "lagged"):
        module = _HeadAfterwards(scope, bias_gamma=None)
        before = module.head.weight.detach().clone()
        options = {"precision": "32-true", "callbacks": [NonFiniteGuard()], "max_steps": 1}
        after = fit(tmp_path, module, **options)["head.weight"]
        gradients.append(before - after)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().min() > 0


class _OwnWindow(Windowless):
    def __init__(self, scope: str) -> None:
        super().__init__(scope)
        self.window = StepWindow(7)


@pytest.mark.parametrize("scope", ["micro_batch", "lagged", "exact"])
def test_the_steps_of_a_window_without_hooks_are_closed_as_well(tmp_path: Path, scope: str) -> None:
    got, expected = (fit(tmp_path, kind(scope)) for kind in (_OwnWindow, Balanced))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class _RecordsOnly(Balanced):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        auxiliary = step_router_losses(self, [routing])
        self.window.record([routing])
        return (total + auxiliary.total) / num_tokens


def test_steps_of_records_alone_are_closed_as_well(tmp_path: Path) -> None:
    module = _RecordsOnly("lagged")
    fit(tmp_path, module, callbacks=[])
    assert not module.window.is_open
    assert module.window.last is not None


def test_a_fit_that_resumes_nothing_does_not_know_the_last_step_of_another(tmp_path: Path) -> None:
    module = Balanced("lagged")
    initial = {name: tensor.clone() for name, tensor in module.double().state_dict().items()}
    first = fit(tmp_path, module)
    module.load_state_dict(initial)
    torch.testing.assert_close(fit(tmp_path, module), first, rtol=0, atol=0)


def test_a_resumed_fit_of_a_users_own_module_equals_a_straight_one_exactly(tmp_path: Path) -> None:
    path = tmp_path / "first.ckpt"

    def train(epochs: int, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        module = Balanced("lagged")
        trainer = make_trainer(
            tmp_path, max_epochs=epochs, accumulate_grad_batches=2, callbacks=[NonFiniteGuard()]
        )
        trainer.fit(module, make_loader(make_batches(LENGTHS[:2])), ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
        return module.state_dict()

    straight, _, resumed = train(2), train(1), train(2, path)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


class _ChangesBatches(Balanced):
    """Writes to each batch, on its way to the device and in its forward; has a batch norm."""

    def __init__(self, scope: str) -> None:
        super().__init__(scope)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("forwards", torch.tensor(0))
        self.seen: list[int] = []

    def on_after_batch_transfer(self, batch: TokenBatch, dataloader_idx: int) -> TokenBatch:
        batch.ids_BS.add_(1)
        return batch

    def loss_sum(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Routing]:
        batch.ids_BS.add_(1).remainder_(VOCAB_SIZE)
        self.norm(batch.ids_BS.double())
        self.forwards = self.forwards + 1
        return super().loss_sum(batch)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        self.seen.append(int(batch.ids_BS.sum()))
        return super().training_step(batch, batch_idx)


def test_looking_ahead_leaves_batches_and_buffers_to_training(tmp_path: Path) -> None:
    exact, lagged = _ChangesBatches("exact"), _ChangesBatches("lagged")
    states = [fit(tmp_path, module) for module in (exact, lagged)]
    assert exact.seen == lagged.seen
    assert states[0]["norm.num_batches_tracked"] == states[0]["forwards"] == len(LENGTHS)
    torch.testing.assert_close(states[0]["norm.running_mean"], states[1]["norm.running_mean"])
