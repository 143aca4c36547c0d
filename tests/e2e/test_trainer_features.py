"""What users expect of a Trainer works with the module, and means what it says."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_moe import MoEModule, OptimConfig, TokenDataModule, TransformerConfig
from tests.kit import reference, reference_model
from tests.kit.runs import (
    GAMMA,
    Run,
    assert_same,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)

ROUTER: dict[str, Any] = {
    "bias_gamma": GAMMA,
    "lb_loss_weight": 0.1,
    "lb_loss_scope": "sequence",
    "z_loss_weight": 0.01,
    "orth_loss_weight": 0.1,
    "jitter_eps": 0.1,
}
CONFIG = tiny_config(**ROUTER)
BYTES = replace(CONFIG, vocab_size=264)
OPTIM = OptimConfig(lr=0.03)
BATCHES = make_batches([(8, 3), (1, 5), (7, 2), (2, 2), (6, 6), (4, 8)])


def _module(config: TransformerConfig = CONFIG, optim: OptimConfig = OPTIM) -> MoEModule:
    return make_module(config, MoEModule, optim)


def _fit(folder: Path, module: MoEModule | None = None, **options: object) -> L.Trainer:
    trainer = make_trainer(folder, **options)
    module = _module() if module is None else module
    trainer.fit(module, make_loader(BATCHES), make_loader(BATCHES[:2]))
    return trainer


def test_fast_dev_run_takes_one_step(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, fast_dev_run=True)
    assert trainer.global_step == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_ends_at_max_steps_exactly(tmp_path: Path, accumulate: int) -> None:
    options = {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": accumulate}
    module = _module()
    trainer = _fit(tmp_path, module, **options)
    assert trainer.global_step == 3
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {3}


def test_limits_on_batches_are_kept(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, limit_train_batches=4, limit_val_batches=1, max_epochs=2)
    assert trainer.global_step == 8
    nats = trainer.callback_metrics["val/ce"]
    only_first = trainer.validate(trainer.lightning_module, make_loader(BATCHES[:1]), verbose=False)
    assert nats.item() == pytest.approx(only_first[0]["val/ce"], rel=1e-6)


def test_no_validation_is_fine(tmp_path: Path) -> None:
    assert "val/ce" not in _fit(tmp_path, limit_val_batches=0).callback_metrics


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
def test_overfitting_two_batches_brings_their_loss_down(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 97 + 26)) * 20)
    data = TokenDataModule.from_text(
        str(text), val_paths=(str(text),), sequence_length=8, batch_size=2
    )
    module = _module(BYTES)
    trainer = make_trainer(tmp_path, overfit_batches=2, max_epochs=30, num_sanity_val_steps=0)
    trainer.fit(module, data)
    assert trainer.global_step == 60
    assert trainer.callback_metrics["train/ce"] < 0.5 * math.log(264)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_other_precisions_train_and_come_close_to_single(
    tmp_path: Path, precision: str, algorithm: str
) -> None:
    # Jitter is drawn in the type of the activations, so it differs.
    config = tiny_config(**(ROUTER | {"jitter_eps": None}))
    options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
    expected = run(tmp_path, _module(config), BATCHES, precision="32-true", **options)
    got = run(tmp_path, _module(config), BATCHES, precision=precision, **options)
    wanted = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}
    assert got.weights["head.weight"].dtype == wanted[precision]
    routers = [weight for name, weight in got.weights.items() if name.endswith("router.weight")]
    assert all(weight.dtype.itemsize >= 4 for weight in routers)
    first, *others = got.steps
    # bfloat16 keeps 3 digits; later steps depend on how those were rounded.
    tolerance = 1e-5 if precision == "64-true" else 0.02
    assert first["train/ce"] == pytest.approx(expected.steps[0]["train/ce"], rel=tolerance)
    for step, exact in zip(others, expected.steps[1:], strict=True):
        assert step["train/ce"] == pytest.approx(exact["train/ce"], rel=0.2)


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 1e-3), ("value", 1e-3)])
def test_clipping_bounds_what_the_optimizer_reads(
    tmp_path: Path, algorithm: str, value: float
) -> None:
    watch = _Gradients()
    module = _module(optim=OptimConfig(lr=0.03, weight_decay=0.0))
    _fit(
        tmp_path,
        module,
        callbacks=[watch],
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
    )
    gradients = torch.cat([gradient.flatten() for gradient in watch.gradients])
    measured = gradients.norm() if algorithm == "norm" else gradients.abs().max()
    assert measured.item() == pytest.approx(value, rel=1e-3)


class _Gradients(L.Callback):
    """Gradients as the last step left them."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: MoEModule, *_: object) -> None:
        self.gradients = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]


def test_checkpoints_and_early_stopping_follow_the_validation_loss(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/ce", save_top_k=1)
    # An unreachable improvement: stops after the second epoch without one.
    stop = EarlyStopping("val/ce", min_delta=100.0, patience=2)
    trainer = _fit(tmp_path, callbacks=[best, stop], enable_checkpointing=True, max_epochs=9)
    assert trainer.current_epoch == 3
    assert best.best_model_score is not None
    loaded = MoEModule.load_from_checkpoint(best.best_model_path, weights_only=True)
    again = make_trainer(tmp_path).validate(loaded, make_loader(BATCHES[:2]), verbose=False)
    assert again[0]["val/ce"] == pytest.approx(best.best_model_score.item(), rel=1e-6)


def test_a_loaded_module_equals_the_saved_one_exactly(tmp_path: Path) -> None:
    module = _module()
    trainer = _fit(tmp_path, module)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = MoEModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert loaded.config == module.config
    assert loaded.optim == module.optim


def test_learning_rates_are_shown_by_role_and_metrics_reach_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    optim = OptimConfig(lr=0.03, router_lr_scale=0.5)
    _fit(tmp_path, _module(optim=optim), callbacks=[LearningRateMonitor()], logger=logger)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = set(rows[0].split(","))
    names = ("loss", "ce", "balance_loss", "z_loss", "lr", "tokens_per_second", "grad_norm")
    assert {f"train/{name}" for name in names} <= columns
    assert {"train/skipped_steps", "train/load_max_over_mean", "val/ce"} <= columns
    assert {"lr-AdamW/decay", "lr-AdamW/router", "lr-AdamW/experts"} <= columns


def test_fitting_twice_with_one_trainer_goes_on(tmp_path: Path) -> None:
    module = _module()
    trainer = _fit(tmp_path, module)
    callbacks = list(trainer.callbacks)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader(BATCHES), make_loader(BATCHES[:2]))
    assert trainer.global_step == 2 * len(BATCHES)
    assert trainer.callbacks == callbacks


def test_an_interrupted_fit_leaves_nothing_for_the_next_one(tmp_path: Path) -> None:
    def steps(module: MoEModule) -> Run:
        return run(tmp_path, module, BATCHES, accumulate_grad_batches=2)

    interrupted, fresh = _module(), _module()
    with pytest.raises(_Interruption):
        run(
            tmp_path,
            interrupted,
            BATCHES,
            accumulate_grad_batches=8,
            callbacks=[_Interrupt(after=1)],
        )
    assert interrupted.window.is_open
    fresh._noise_seed = interrupted._noise_seed  # both see the same jitter
    assert steps(interrupted).steps == steps(fresh).steps


class _Interruption(Exception):
    """None of the program's own errors."""


class _Interrupt(L.Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: MoEModule, outputs: object, batch: object, index: int
    ) -> None:
        if index == self.after:
            raise _Interruption


def test_every_micro_batch_has_noise_of_its_own_that_the_seed_decides(tmp_path: Path) -> None:
    drawn: list[list[float]] = [[], []]
    for numbers in drawn:
        module = _module()
        block = module.model.blocks[0]
        block.register_forward_pre_hook(lambda *_, to=numbers: to.append(torch.rand(()).item()))
        _fit(tmp_path, module, accumulate_grad_batches=2, limit_val_batches=0)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == len(BATCHES)


def test_test_and_validation_agree_on_the_same_batches(tmp_path: Path) -> None:
    trainer, module = make_trainer(tmp_path), _module()
    validated = trainer.validate(module, make_loader(BATCHES), verbose=False)[0]
    tested = trainer.test(module, make_loader(BATCHES), verbose=False)[0]
    assert tested == {"test/ce": validated["val/ce"]}


def test_the_validation_loss_is_the_mean_over_tokens_of_unequal_batches(tmp_path: Path) -> None:
    module = _module()
    got = make_trainer(tmp_path).validate(module, make_loader(BATCHES), verbose=False)[0]["val/ce"]
    weights = {name: value.double() for name, value in module.model.state_dict().items()}
    nats, num_tokens = 0.0, 0
    for batch in BATCHES:
        logits, _ = reference_model.transformer(batch.ids_BS, weights, module.config)
        labels = batch.labels_BS.flatten()
        nats += reference.cross_entropy(logits.flatten(0, 1), labels).item()
        num_tokens += int((labels != -100).sum())
    assert got == pytest.approx(nats / num_tokens, rel=1e-6)


def test_bits_per_byte_is_the_loss_over_ln_2_and_over_bytes_per_token(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"train on this text" * 4)
    (tmp_path / "val.txt").write_bytes(b"validate")
    data = TokenDataModule.from_text(
        str(tmp_path / "train.txt"),
        val_paths=(str(tmp_path / "val.txt"),),
        sequence_length=5,
        batch_size=2,
    )
    module = _module(BYTES)
    logged = make_trainer(tmp_path).validate(module, data, verbose=False)[0]
    # 8 bytes and the document's end make 9 tokens, of which 8 are predicted: 7 bytes and the end.
    expected = logged["val/ce"] * 8 / 7 / math.log(2)
    assert logged["val/bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_two_deterministic_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        first, second = (run(tmp_path, _module(), BATCHES, deterministic=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=0)
    assert first.steps == second.steps


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_of_a_module_train_like_it(
    tmp_path: Path, clone: Callable[[MoEModule], MoEModule]
) -> None:
    module = _module()
    _fit(tmp_path, module, limit_train_batches=3, accumulate_grad_batches=2)
    copied = clone(module)
    got, expected = (run(tmp_path, one, BATCHES) for one in (copied, module))
    torch.testing.assert_close(got.weights, expected.weights, rtol=0, atol=0)


def test_a_profiler_names_the_steps(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, profiler="simple")
    assert "training_step" in trainer.profiler.summary()


@pytest.mark.filterwarnings("ignore:You are trying to `self.log..` but `Trainer.barebones=True")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_barebones_trainer_trains(tmp_path: Path) -> None:
    module = _module()
    before = module.model.head.weight.detach().clone()
    trainer = L.Trainer(barebones=True, accelerator="cpu", devices=1, max_steps=2)
    trainer.fit(module, make_loader(BATCHES))
    assert trainer.global_step == 2
    assert not torch.equal(before, module.model.head.weight)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_changes_nothing(tmp_path: Path) -> None:
    got = run(tmp_path, _module(), BATCHES, detect_anomaly=True)
    assert got.steps == run(tmp_path, _module(), BATCHES).steps


# torch 2.13 warns of what its own tracer does.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_compiled_blocks_train_like_eager_ones(
    tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tracer can't follow the shape checker.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    config = replace(CONFIG, recompute=recompute, num_layers=1)
    eager, compiled = _module(config), _module(config)
    for block in compiled.model.blocks:
        block.compile(backend="eager")
    expected = run(tmp_path, eager, BATCHES, accumulate_grad_batches=2)
    got = run(tmp_path, compiled, BATCHES, accumulate_grad_batches=2)
    assert_same(got, expected)
