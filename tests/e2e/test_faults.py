"""What goes wrong is seen, counted and named; what is unaffected stays as it was."""

import copy
import math
from pathlib import Path
from typing import Any

import jaxtyping
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_moe import MoEModule, OptimConfig, TokenBatch, TransformerConfig
from lightning_moe.callbacks import NonFiniteGuard, StartFrom
from tests.kit.runs import (
    GAMMA,
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    run,
    tiny_config,
)

ROUTER: dict[str, Any] = {"bias_gamma": GAMMA, "lb_loss_weight": 0.1}
OPTIM = OptimConfig(lr=0.01, weight_decay=0.5, max_skipped_steps=2)
BATCHES = make_batches([(8, 3), (1, 5), (7, 2), (2, 2), (6, 6)])


def _weights(module: MoEModule) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class _BadSteps(MoEModule):
    """Its loss is not finite in the micro-batches named here."""

    bad: tuple[int, ...] = ()
    factor = math.inf

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if batch_idx in self.bad else loss


class _Watch(L.Callback):
    """Weights and moments before every step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: MoEModule, *_: object) -> None:
        moments = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
        self.states.append((_weights(pl_module), moments))


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_without_finite_gradients_changes_nothing_and_training_goes_on(
    tmp_path: Path, factor: float, clip: float | None
) -> None:
    module = make_module(tiny_config(**ROUTER), _BadSteps, OPTIM)
    module.bad, module.factor = (1, 2), factor
    watch = _Watch()
    got = run(
        tmp_path, module, BATCHES, callbacks=[watch], precision="32-true", gradient_clip_val=clip
    )
    # Before batch 1, 2 and 3: unchanged weights, moments and moment steps; before 4: changed again.
    torch.testing.assert_close(watch.states[1:3], watch.states[2:4], rtol=0, atol=0)
    assert not torch.equal(
        watch.states[3][0]["model.head.weight"], watch.states[4][0]["model.head.weight"]
    )
    assert [step["train/skipped_steps"] for step in got.steps] == [0, 1, 2, 2, 2]
    assert got.num_steps == 5
    assert all(weight.isfinite().all() for weight in got.weights.values())


def test_one_bad_micro_batch_skips_the_whole_step(tmp_path: Path) -> None:
    module = make_module(tiny_config(**ROUTER), _BadSteps, OPTIM)
    module.bad = (0,)
    before = _weights(module)
    got = run(tmp_path, module, BATCHES[:2], accumulate_grad_batches=2, precision="32-true")
    torch.testing.assert_close(_weights(module), before, rtol=0, atol=0)
    assert got.steps[0]["train/skipped_steps"] == 1


def test_skipped_steps_count_again_from_zero_after_a_good_one(tmp_path: Path) -> None:
    module = make_module(tiny_config(**ROUTER), _BadSteps, OPTIM)
    module.bad = (0, 1, 3, 4)
    assert run(tmp_path, module, BATCHES, precision="32-true").steps[-1]["train/skipped_steps"] == 4


def test_a_poisoned_weight_ends_training_and_is_named(tmp_path: Path) -> None:
    module = make_module(tiny_config(**ROUTER), MoEModule, OPTIM)
    with torch.no_grad():
        module.model.final_norm.weight[0] = math.nan
    before = _weights(module)
    expected = (
        r"3 steps in a row had non-finite gradients \(norm nan at step 2; "
        r"non-finite weights: model.final_norm.weight\); more than optim.max_skipped_steps=2"
    )
    with pytest.raises(RuntimeError, match=expected):
        run(tmp_path, module, BATCHES, precision="32-true")
    torch.testing.assert_close(_weights(module), before, rtol=0, atol=0, equal_nan=True)


def test_a_guard_of_the_trainer_replaces_the_modules_own(tmp_path: Path) -> None:
    module = make_module(tiny_config(**ROUTER), _BadSteps, OPTIM)
    module.bad = (0,)
    with pytest.raises(RuntimeError, match=r"1 steps in a row.*all weights are finite"):
        run(tmp_path, module, BATCHES, precision="32-true", callbacks=[NonFiniteGuard(0)])


def test_a_guard_cannot_bear_less_than_no_step() -> None:
    with pytest.raises(ValueError, match="max_in_a_row=-1 must be at least 0"):
        NonFiniteGuard(-1)


def test_the_norm_is_that_of_divided_gradients_before_clipping(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, make_module(tiny_config(**ROUTER), MoEModule, OPTIM), batches, **options)
        for batches, options in (
            (BATCHES[:2], {"accumulate_grad_batches": 2, "gradient_clip_val": 1e-3}),
            ([_joined(BATCHES[:2])], {}),
        )
    ]
    norms = [got.steps[0]["train/grad_norm"] for got in runs]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    assert norms[0] > 0.1


def _joined(batches: list[TokenBatch]) -> TokenBatch:
    return TokenBatch(
        ids_BS=torch.cat([batch.ids_BS for batch in batches]),
        labels_BS=torch.cat([batch.labels_BS for batch in batches]),
    )


def test_a_batch_of_another_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    module = make_module(tiny_config())
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0)
    with pytest.raises(TypeError, match="needs batches of type TokenBatch, got Tensor"):
        trainer.fit(
            module, make_loader([torch.zeros(2, 8, dtype=torch.int64)]), make_loader(BATCHES)
        )


# ---- checkpoints ---------------------------------------------------------------------------------


def _trained(
    folder: Path, config: TransformerConfig | None = None, batches: list[TokenBatch] = BATCHES
) -> Path:
    """A checkpoint after a fit."""
    config = tiny_config(**ROUTER) if config is None else config
    module = make_module(config, MoEModule, OPTIM)
    trainer = make_trainer(folder, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder)])
    trainer.fit(module, make_loader(batches), make_loader(BATCHES[:1]))
    path = folder / "model.ckpt"
    trainer.save_checkpoint(path)
    return path


def test_a_checkpoint_holds_plain_values_only_and_all_of_the_state(tmp_path: Path) -> None:
    checkpoint = torch.load(_trained(tmp_path), weights_only=True)
    assert any(name.endswith("score_bias") for name in checkpoint["state_dict"])
    state = checkpoint["lightning_moe"]
    assert state.keys() == {"nominal_tokens", "tokens_seen", "noise_seed", "window"}
    assert [len(counts) for counts in state["window"]["previous"]] == [4, 4]
    assert checkpoint["hyper_parameters"]["config"]["d_model"] == 16


def test_a_checkpoint_is_no_larger_than_weights_and_moments(tmp_path: Path) -> None:
    fields = {name: getattr(tiny_config(), name) for name in ("attention", "moe", "num_layers")}
    config = type(tiny_config())(vocab_size=1000, d_model=256, **fields)
    path = _trained(tmp_path, config, BATCHES[:1])
    num_bytes = 3 * 4 * config.num_params
    assert num_bytes < path.stat().st_size < 1.05 * num_bytes


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    path = _trained(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    module = make_module(tiny_config(**ROUTER), MoEModule, OPTIM)
    with pytest.raises(RuntimeError, match="PytorchStreamReader failed reading zip archive"):
        make_trainer(tmp_path).fit(
            module, make_loader(BATCHES), make_loader(BATCHES), ckpt_path=path
        )


# ---- a new run from an old one -------------------------------------------------------------------


class _AtStart(L.Callback):
    """What training starts with."""

    def on_train_start(self, trainer: L.Trainer, pl_module: MoEModule) -> None:
        self.model = copy.deepcopy(pl_module.state_dict())
        self.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())
        self.global_step = trainer.global_step


def _start(
    folder: Path, *callbacks: L.Callback, config: TransformerConfig | None = None, **options: object
) -> _AtStart:
    config = tiny_config(**ROUTER) if config is None else config
    module = make_module(config, MoEModule, OptimConfig(lr=0.5, warmup=2), seed=77)
    start = _AtStart()
    trainer = make_trainer(folder, callbacks=[*callbacks, start])
    trainer.fit(module, make_loader(BATCHES), make_loader(BATCHES[:1]), **options)
    return start


def test_a_new_run_takes_weights_biases_and_moments_and_nothing_else(tmp_path: Path) -> None:
    path = _trained(tmp_path)
    old = torch.load(path, weights_only=True)
    start = _start(tmp_path, StartFrom(path))
    torch.testing.assert_close(start.model, old["state_dict"], rtol=0, atol=0)
    moments = old["optimizer_states"][0]["state"]
    torch.testing.assert_close(start.optimizer["state"], moments, rtol=0, atol=0)
    groups = start.optimizer["param_groups"]
    assert {group["lr"] for group in groups} == {0.25}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    assert start.global_step == 0


def test_moments_can_be_left_behind(tmp_path: Path) -> None:
    start = _start(tmp_path, StartFrom(_trained(tmp_path), moments=False))
    assert start.optimizer["state"] == {}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_new_run_may_not_go_on_with_another_one_as_well(tmp_path: Path) -> None:
    path = _trained(tmp_path)
    with pytest.raises(ValueError, match=r"init_from=.* and ckpt_path=.*give one of the two"):
        _start(tmp_path, StartFrom(path), ckpt_path=path)


def test_a_new_run_refuses_another_model(tmp_path: Path) -> None:
    other = tiny_config(**ROUTER, bias=True)
    with pytest.raises(ValueError, match=r"(?s)holds another model.*router.bias"):
        _start(tmp_path, StartFrom(_trained(tmp_path)), config=other)


def test_a_new_run_refuses_weights_alone_unless_it_wants_no_moments(tmp_path: Path) -> None:
    path = _trained(tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    torch.save({"state_dict": checkpoint["state_dict"]}, path)
    with pytest.raises(ValueError, match=r"0 optimizers, this run has 1; use a full checkpoint"):
        _start(tmp_path, StartFrom(path))
    _start(tmp_path, StartFrom(path, moments=False))


@pytest.mark.parametrize("num_bytes", [0, 10, 5000])
def test_a_new_run_refuses_a_truncated_file(tmp_path: Path, num_bytes: int) -> None:
    path = _trained(tmp_path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"init_from=.*model.ckpt can't be read as a checkpoint"):
        _start(tmp_path, StartFrom(path))


@pytest.mark.parametrize("content", [b"", b"12345", b"\xff" * 40, bytes(8) + b"{}"])
def test_a_new_run_refuses_a_damaged_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"init_from=.*model.safetensors can't be read as a check"):
        _start(tmp_path, StartFrom(path))


def test_a_new_run_refuses_a_file_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no Lightning checkpoint: it has no state_dict"):
        _start(tmp_path, StartFrom(path))


def test_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"init_from=.*none.ckpt is not a file"):
        StartFrom(tmp_path / "none.ckpt")
