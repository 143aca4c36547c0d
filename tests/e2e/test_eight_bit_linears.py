"""A Trainer whose attention and dense feed-forward networks compute in eight bits, emulated."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_moe import MoEModule, MoEPrecision, OptimConfig
from lightning_moe.config import LayerConfig, MoEConfig, SharedExpertConfig
from lightning_moe.precision import LinearRecipe
from lightning_moe.strategy.linears import LinearSwap
from tests.kit.runs import (
    make_batches,
    make_loader,
    make_module,
    make_trainer,
    tiny_config,
    train_losses,
)

_TINY = tiny_config(bias_gamma=1e-3)
assert isinstance(_TINY.moe, MoEConfig)
# A dense layer, and one with a shared expert.
CONFIG = replace(
    _TINY,
    d_model=32,
    moe=replace(_TINY.moe, hidden_size=32, shared=SharedExpertConfig(hidden_size=32)),
    layer_overrides={0: LayerConfig(dense_hidden_size=64)},
)
# 16 and 8 rows of tokens: no format has blocks of 8.
BATCHES = make_batches([(8, 3), (5,), (7, 2), (2, 2)])
_fit = partial(train_losses, BATCHES)
ROWWISE = {"linears": "fp8_rowwise", "base": "32-true", "emulate": True}


def _module(**options: Any) -> MoEModule:
    return make_module(replace(CONFIG, **options), MoEModule, OptimConfig(lr=0.03))


@pytest.mark.parametrize(
    ("linears", "base"),
    [
        ("fp8_tensorwise", "32-true"),
        ("fp8_rowwise", "bf16-mixed"),
        ("fp8_rowwise", "bf16-true"),
        ("mxfp8", "bf16-mixed"),
    ],
)
def test_the_plugin_swaps_linear_layers_and_has_the_base_as_precision(
    tmp_path: Path, linears: str, base: str
) -> None:
    by_hand = _module()
    LinearSwap(LinearRecipe(name=linears, emulate=True)).swap(by_hand)
    expected = _fit(tmp_path, by_hand, precision=base)
    module = _module()
    before = dict(module.named_modules())
    plugin = MoEPrecision(linears=linears, base=base, emulate=True)
    assert _fit(tmp_path, module, plugins=[plugin]) == expected
    plain = _fit(tmp_path, _module(), precision=base)
    assert plain != expected
    assert plain[0] == pytest.approx(expected[0], rel=0.1)
    # Outside of the fit all modules are those of before.
    after = dict(module.named_modules())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)
    assert module.moe_layers[0].router.weight.dtype == torch.float32


def test_experts_and_linear_layers_are_chosen_apart(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"experts": "mxfp8"},
        {"linears": "mxfp8"},
        {"experts": "mxfp8", "linears": "mxfp8"},
        {"experts": "mxfp8", "linears": "mxfp8", "scale_mode": "floor"},
        {"experts": "fp8_rowwise", "linears": "mxfp8", "scale_mode": "floor"},
    ]
    losses = [
        tuple(_fit(tmp_path, _module(), plugins=[MoEPrecision(**o, base="32-true", emulate=True)]))
        for o in options
    ]
    assert len(set(losses)) == len(options)


def test_recomputed_blocks_train_the_same_exactly(tmp_path: Path) -> None:
    plain, recomputed = (
        _fit(tmp_path, _module(recompute=way), plugins=[MoEPrecision(**ROWWISE)])
        for way in ("none", "block")
    )
    assert recomputed == plain


def _kinds(state: Any) -> Any:
    """The same nesting, with shape and type in the place of each tensor."""
    if isinstance(state, Tensor):
        return state.shape, state.dtype
    if isinstance(state, dict):
        return {key: _kinds(value) for key, value in state.items()}
    return [_kinds(value) for value in state] if isinstance(state, list) else type(state)


def test_precision_can_change_on_resume_and_checkpoints_are_the_same(tmp_path: Path) -> None:
    saved = {}
    for name, plugins in {"eight": [MoEPrecision(**ROWWISE)], "plain": []}.items():
        trainer = make_trainer(tmp_path, max_steps=2, plugins=plugins)
        trainer.fit(_module(), make_loader(BATCHES), make_loader(BATCHES[:1]))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        saved[name] = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    assert saved["eight"].keys() == saved["plain"].keys()
    for part in ("state_dict", "optimizer_states"):
        assert _kinds(saved["eight"][part]) == _kinds(saved["plain"][part])
    assert list(saved["eight"]["state_dict"]) == list(saved["plain"]["state_dict"])
    for name in saved:
        path = str(tmp_path / f"{name}.ckpt")
        plain = _fit(tmp_path, _module(), path, max_epochs=2)
        eight = _fit(tmp_path, _module(), path, max_epochs=2, plugins=[MoEPrecision(**ROWWISE)])
        assert len(plain) == len(eight) == 4
        assert plain != eight
        assert eight[0] == pytest.approx(plain[0], rel=0.05)


def test_what_was_converted_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        _fit(tmp_path, _module(), plugins=[MoEPrecision(**ROWWISE)])
    assert [line for line in caplog.messages if line.startswith("linear layers")] == [
        "linear layers: 12 of attention and dense feed-forward networks compute in fp8_rowwise (emulated by matmuls of "
        "the codes' values)"
    ]


@pytest.mark.parametrize(
    ("options", "width", "message"),
    [
        ({"emulate": False}, 32, "can't work here: the device is cpu.*or leave linears out$"),
        (
            {"linears": "mxfp8"},
            48,
            r"can't convert model\.blocks\.0\.attention\.q_proj: it maps 48",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_batch(
    tmp_path: Path, options: dict[str, Any], width: int, message: str
) -> None:
    module = _module(d_model=width)
    calls: list[object] = []
    module.moe_layers[0].router.register_forward_pre_hook(lambda *call: calls.append(call))
    before = dict(module.named_modules())
    with pytest.raises(ValueError, match=message):
        _fit(tmp_path, module, plugins=[MoEPrecision(**{**ROWWISE, **options})])
    assert calls == []
    assert all(part is before[name] for name, part in module.named_modules())


def test_a_module_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes rows in bfloat16 or float32, not in float64"):
        _fit(tmp_path, _module().double(), plugins=[MoEPrecision(**ROWWISE)])


class _Dense(L.LightningModule):
    """No layer of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)


def test_a_module_without_such_layers_is_refused(tmp_path: Path) -> None:
    module = _Dense()
    trainer = make_trainer(tmp_path, plugins=[MoEPrecision(**ROWWISE)])
    module.training_step = lambda batch, _: module.layer(batch).mean()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(ValueError, match="linears=fp8_rowwise has no effect: the module has no"):
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 32)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linears": "fp8"}, "linears='fp8' must be one of fp8_tensorwise, fp8_rowwise, mxfp8"),
        ({"linears": None}, "has no effect without experts or linears"),
        ({"scale_mode": "floor"}, "scale_mode='floor' has no effect with experts=None and linears"),
        ({"fp8_only": True}, "fp8_only=True has no effect without experts"),
        ({"scale_mode": "up"}, r"MoEPrecision\.scale_mode='up' must be one of rceil, floor"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEPrecision(**{**ROWWISE, **options})
