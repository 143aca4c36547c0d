"""The trace holds what the routers chose, of the asked steps only, and changes nothing."""

import inspect
from pathlib import Path

import pytest
import torch

from lightning_moe.callbacks import RoutingTrace
from lightning_moe.metrics.route_comparison import compare, read_trace
from lightning_moe.metrics.token_routes import RouteKey, read_routes
from tests.kit.modules import OwnModule, Recording, TwoOptimizers
from tests.kit.runs import (
    History,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    tiny_config,
)

BATCHES = make_batches([(8, 3), (5, 8), (2, 2), (8, 8), (1, 7), (6, 4)])
FILE = "routes-rank0.npz"


def _fit(
    folder: Path,
    *callbacks: object,
    recompute: str = "none",
    accumulate: int = 2,
    **options: object,
) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Logged numbers of every step, and all weights at the end."""
    module, history = make_module(tiny_config(recompute=recompute)), History()
    trainer = make_trainer(
        folder, callbacks=[*callbacks, history], accumulate_grad_batches=accumulate, **options
    )
    trainer.fit(module, make_loader(BATCHES), make_loader(BATCHES[:1]))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert not any(layer.router.trace for layer in module.moe_layers)
    return history.steps, weights


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_losses_and_weights_are_equal_bit_for_bit_with_and_without(
    tmp_path: Path, recompute: str
) -> None:
    plain, plain_weights = _fit(tmp_path / "plain", recompute=recompute)
    traced, weights = _fit(tmp_path / "traced", RoutingTrace([0, 2]), recompute=recompute)
    assert len(plain) == 3
    for ours, theirs in zip(traced, plain, strict=True):
        assert {k: v for k, v in ours.items() if "per_second" not in k} == {
            k: v for k, v in theirs.items() if "per_second" not in k
        }
    assert torch.equal(weights, plain_weights)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_every_micro_batch_and_layer_of_the_asked_steps_is_there_once(
    tmp_path: Path, recompute: str
) -> None:
    _fit(tmp_path, RoutingTrace([0, 2]), recompute=recompute)
    records = read_routes(tmp_path / FILE)
    assert list(records) == [
        RouteKey(step, micro_batch, layer)
        for step in (0, 2)
        for micro_batch in (0, 1)
        for layer in (0, 1)
    ]
    for key, routes in records.items():
        labels_BS = BATCHES[2 * key.step + key.micro_batch].labels_BS
        assert routes.ids.shape == routes.weights.shape == (16, 2)
        assert routes.ids.dtype == "uint8"
        assert routes.valid.tolist() == (labels_BS != -100).flatten().tolist()


def test_routes_are_those_of_the_first_forward(tmp_path: Path) -> None:
    module = make_module(tiny_config())
    for layer in module.moe_layers:
        layer.router.trace = True
    expected = [record.tokens for record in module(BATCHES[0].ids_BS)[1]]
    _fit(tmp_path, RoutingTrace([0]))
    records = read_routes(tmp_path / FILE)
    for layer, tokens in enumerate(expected):
        routes = records[RouteKey(0, 0, layer)]
        assert routes.ids.tolist() == tokens.ids_TK.tolist()
        torch.testing.assert_close(torch.from_numpy(routes.weights), tokens.weights_TK.detach())
        torch.testing.assert_close(torch.from_numpy(routes.margins), tokens.margin_T)


def test_layers_can_be_chosen_and_the_file_named(tmp_path: Path) -> None:
    _fit(tmp_path, RoutingTrace([1], layers=[1], path="traces/mine.npz"))
    records = read_routes(tmp_path / "traces" / "mine-rank0.npz")
    assert list(records) == [RouteKey(1, 0, 1), RouteKey(1, 1, 1)]
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["mine-rank0.npz"]


def test_what_was_seen_is_written_when_data_end_early_or_training_fails(tmp_path: Path) -> None:
    # Three steps of data, and a fourth one asked for.
    with pytest.warns(UserWarning, match=r"steps=\[3\] were not reached: .* before step 3"):
        _fit(tmp_path / "early", RoutingTrace([1, 3]))
    assert {key.step for key in read_routes(tmp_path / "early" / FILE)} == {1}

    class Failing(RoutingTrace):
        def on_train_batch_start(self, *args: object) -> None:
            super().on_train_batch_start(*args)
            if self._step == 2:
                raise RuntimeError("failed on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        _fit(tmp_path / "failed", Failing([0, 2]))
    assert {key.step for key in read_routes(tmp_path / "failed" / FILE)} == {0}


def test_a_resumed_run_keeps_what_the_first_part_wrote(tmp_path: Path) -> None:
    def train(folder: str, epochs: int, steps: list[int], ckpt_path: Path | None = None) -> None:
        trainer = make_trainer(
            tmp_path / folder, callbacks=[RoutingTrace(steps)], max_epochs=epochs
        )
        loaders = make_loader(BATCHES), make_loader(BATCHES[:1])
        trainer.fit(make_module(tiny_config()), *loaders, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "end.ckpt")

    train("straight", 2, [0, 8])
    train("parts", 1, [0])
    train("parts", 2, [0, 8], tmp_path / "end.ckpt")
    straight, resumed = (read_trace(tmp_path / name) for name in ("straight", "parts"))
    assert [key.step for key in resumed] == [0, 0, 8, 8]
    assert compare(straight, resumed, tie=0.0).is_equal


def test_steps_before_a_resume_that_no_file_has_are_named(tmp_path: Path) -> None:
    loader = make_loader(BATCHES[:1])
    first = make_trainer(tmp_path, max_epochs=2)
    first.fit(Recording(), loader)
    first.save_checkpoint(tmp_path / "end.ckpt")
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[RoutingTrace([1, 2])])
    with pytest.warns(UserWarning, match=r"steps=\[1\] are not traced: .* starts at step 2"):
        trainer.fit(Recording(), loader, ckpt_path=tmp_path / "end.ckpt")
    assert [key.step for key in read_routes(tmp_path / FILE)] == [2]


def test_a_batch_in_which_two_optimizers_step_is_one_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RoutingTrace([2, 3, 4])])
    trainer.fit(TwoOptimizers(), make_loader(BATCHES))
    assert [key.step for key in read_routes(tmp_path / FILE)] == [2, 3, 4]


def test_files_of_ranks_that_only_an_earlier_run_had_are_deleted(tmp_path: Path) -> None:
    kept = ["mine-rank7.npz", "routes-rank1.txt", "routes-rankx.npz"]
    for name in (*kept, "routes-rank1.npz", "routes-rank12.npz"):
        (tmp_path / name).write_text("old")
    _fit(tmp_path, RoutingTrace([0]))
    assert sorted(path.name for path in tmp_path.glob("*rank*")) == [*kept[:1], FILE, *kept[1:]]


def test_a_router_that_traced_before_goes_on_doing_so(tmp_path: Path) -> None:
    module = Recording()
    module.moe.router.trace = True
    make_trainer(tmp_path, callbacks=[RoutingTrace([0])]).fit(module, make_loader(BATCHES))
    assert module.moe.router.trace


def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    trace = RoutingTrace([0], path="a_file/routes.npz")
    with pytest.warns(UserWarning, match="RoutingTrace: writing .* failed"):
        steps, _ = _fit(tmp_path, trace)
    assert len(steps) == 3


def test_it_works_in_a_module_with_a_loss_of_its_own(tmp_path: Path) -> None:
    module = Recording()
    trainer = make_trainer(tmp_path, callbacks=[RoutingTrace([0])])
    trainer.fit(module, make_loader(BATCHES))
    assert list(read_routes(tmp_path / FILE)) == [RouteKey(0, 0, 0)]
    assert not module.moe.router.trace
    assert module.window.observers == []


def test_a_module_that_hands_over_no_records_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[RoutingTrace([0])])
    with pytest.raises(RuntimeError, match="RoutingTrace needs one routing record per MoE layer"):
        trainer.fit(OwnModule(bias_gamma=None), make_loader(BATCHES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": []}, r"steps=\[\] must be a list that names steps from 0 on"),
        ({"steps": [3, -1]}, r"steps=\[3, -1\] must be a list"),
        ({"steps": [1.5]}, r"steps=\[1\.5\] must be a list"),
        ({"steps": [True]}, r"steps=\[True\] must be a list"),
        ({"steps": 3}, r"steps=3 must be a list"),
        ({"steps": [0], "layers": []}, r"layers=\[\] must be a list.*leave it out to trace all"),
        ({"steps": [0], "layers": 0}, r"layers=0 must be a list"),
        ({"steps": [0], "path": "/elsewhere/routes.npz"}, "must stay below the trainer's root"),
        ({"steps": [0], "path": "../routes.npz"}, "must stay below the trainer's root"),
        ({"steps": [0], "path": "routes.txt"}, r"path='routes\.txt' must end in \.npz"),
    ],
)
def test_options_that_trace_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        # The shape checker of the tests would refuse other types by itself.
        inspect.unwrap(RoutingTrace.__init__)(object.__new__(RoutingTrace), **options)


def test_layers_and_steps_that_cannot_be_reached_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers=\[2\] don't exist.* 0 to 1"):
        _fit(tmp_path, RoutingTrace([0], layers=[1, 2]))
    with pytest.raises(ValueError, match=r"steps=\[0, 2\] can't all be reached.*max_steps=2"):
        _fit(tmp_path, RoutingTrace([0, 2]), max_steps=2)
