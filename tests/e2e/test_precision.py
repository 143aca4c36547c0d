"""A Trainer whose experts compute in eight bits, emulated."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe import FP8Config, MoEModule, MoEPrecision, OptimConfig
from lightning_moe.config import MoEConfig
from tests.kit.modules import OwnModule
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
CONFIG = replace(_TINY, d_model=32, moe=replace(_TINY.moe, hidden_size=32))
BATCHES = make_batches([(8, 3), (1, 5), (7, 2), (2, 2)])
_fit = partial(train_losses, BATCHES)
MXFP8 = {"experts": "mxfp8", "base": "32-true", "emulate": True}


def _module(**moe: Any) -> MoEModule:
    assert isinstance(CONFIG.moe, MoEConfig)
    config = replace(CONFIG, moe=replace(CONFIG.moe, **moe))
    return make_module(config, MoEModule, OptimConfig(lr=0.03))


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_plugin_is_the_backend_in_the_config_and_the_base_as_precision(
    tmp_path: Path, base: str
) -> None:
    in_config = _module(backend="mxfp8", fp8=FP8Config(emulate=True))
    expected = _fit(tmp_path, in_config, precision=base)
    module = _module()
    got = _fit(tmp_path, module, plugins=[MoEPrecision(**{**MXFP8, "base": base})])
    assert got == expected
    assert got != _fit(tmp_path, _module(), precision=base)
    for layer in module.moe_layers:
        router = layer.router
        assert router.weight.dtype == router.score_bias.dtype == torch.float32
        assert layer.experts.w_down.dtype == (
            torch.bfloat16 if base == "bf16-true" else torch.float32
        )


class _Followed(L.Callback):
    """Whether experts have computed with their present weights, after each step."""

    def __init__(self) -> None:
        self.fresh: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: MoEModule, *_: object) -> None:
        """Compute once with what they have kept, and once without."""
        experts = pl_module.moe_layers[0].experts
        rows, counts = torch.ones(4, 32), torch.ones(4, dtype=torch.int64)
        kept = experts(rows, counts)
        experts.backend.forget()
        self.fresh.append(torch.equal(kept, experts(rows, counts)))


def test_quantized_weights_follow_the_optimizer(tmp_path: Path) -> None:
    followed = _Followed()
    trainer = make_trainer(tmp_path, callbacks=[followed], plugins=[MoEPrecision(**MXFP8)])
    trainer.fit(_module(), make_loader(BATCHES), make_loader(BATCHES[:1]))
    assert followed.fresh == [True] * len(BATCHES)


def test_experts_run_on_what_their_config_says_after_the_fit(tmp_path: Path) -> None:
    module = _module()
    _fit(tmp_path, module, plugins=[MoEPrecision(**MXFP8)])
    experts = module.moe_layers[0].experts
    assert "auto takes torch" in experts.backend.account(experts.sizes())


def test_backends_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        _fit(tmp_path, _module(), plugins=[MoEPrecision(**MXFP8)])
    said = [line for line in caplog.messages if line.startswith("expert backend")]
    assert said == [
        "expert backend: mxfp8 in torch.float32 on cpu (emulated by float32 matmuls of the codes)"
    ]


@pytest.mark.parametrize(
    ("backend", "fp8", "precision", "reason"),
    [
        ("mxfp8", FP8Config(), "32-true", "the device is cpu"),
        ("mxfp8", FP8Config(emulate=True), "64-true", "rows in float32 or bfloat16, not in"),
        ("torch", FP8Config(), "64-true", "no torch.float64 kernel"),
        ("grouped_gemm", FP8Config(), "bf16-mixed", "is not installed"),
    ],
)
def test_what_a_backend_cannot_run_is_refused_before_the_first_batch(
    tmp_path: Path, backend: str, fp8: FP8Config, precision: str, reason: str
) -> None:
    module = _module(backend=backend, fp8=fp8)
    calls: list[object] = []
    module.moe_layers[0].router.register_forward_pre_hook(lambda *call: calls.append(call))
    with pytest.raises(ValueError, match=rf"model\.moe\.backend={backend} can't.*{reason}"):
        _fit(tmp_path, module, precision=precision)
    assert calls == []


def test_the_plugin_refuses_a_users_own_module_before_the_first_batch(tmp_path: Path) -> None:
    module = OwnModule()
    calls: list[object] = []
    module.moe.router.register_forward_pre_hook(lambda *call: calls.append(call))
    trainer = make_trainer(tmp_path, plugins=[MoEPrecision("mxfp8")])
    with pytest.raises(ValueError, match=r"^MoEPrecision experts=mxfp8 can't run"):
        trainer.fit(module, make_loader(BATCHES))
    assert calls == []


def test_the_remedy_is_one_of_whoever_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^MoEPrecision experts=mxfp8 can't run") as refused:
        _fit(tmp_path, _module(), plugins=[MoEPrecision("mxfp8")])
    assert "(emulate=True of MoEPrecision, if that asked)" in str(refused.value)
    assert str(refused.value).endswith("; or leave the plugin out")
    with pytest.raises(ValueError, match=r"; or use model\.moe\.backend=auto$"):
        _fit(tmp_path, _module(backend="mxfp8"))


def test_precision_can_change_on_resume_and_checkpoints_are_the_same(tmp_path: Path) -> None:
    saved = {}
    for name, plugins in {"mxfp8": [MoEPrecision(**MXFP8)], "fp32": []}.items():
        trainer = make_trainer(tmp_path, max_steps=2, plugins=plugins)
        trainer.fit(_module(), make_loader(BATCHES), make_loader(BATCHES[:1]))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        saved[name] = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    kinds = [
        {key: (value.shape, value.dtype) for key, value in checkpoint["state_dict"].items()}
        for checkpoint in saved.values()
    ]
    assert kinds[0] == kinds[1]
    assert saved["mxfp8"].keys() == saved["fp32"].keys()
    path = str(tmp_path / "mxfp8.ckpt")
    rowwise = MoEPrecision(**{**MXFP8, "experts": "fp8_rowwise"})
    in_fp32 = _fit(tmp_path, _module(), path, max_epochs=2)
    in_rowwise = _fit(tmp_path, _module(), path, max_epochs=2, plugins=[rowwise])
    assert len(in_fp32) == len(in_rowwise) == 4
    assert in_fp32 != in_rowwise
    assert in_rowwise[0] == pytest.approx(in_fp32[0], rel=0.02)


def test_a_backend_that_the_config_asks_for_clashes_with_another(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model\.moe\.backend=loop.*leave model\.moe\.backend=auto"
    ):
        _fit(tmp_path, _module(backend="loop"), plugins=[MoEPrecision(**MXFP8)])
    with pytest.raises(ValueError, match=r"emulate=False.*clashes.*emulate=True"):
        _fit(tmp_path, _module(backend="mxfp8"), plugins=[MoEPrecision(**MXFP8)])


class _Dense(L.LightningModule):
    """No experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The mean."""
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_experts_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, plugins=[MoEPrecision(**MXFP8)])
    with pytest.raises(ValueError, match=r"has no effect: the module has no layer"):
        trainer.fit(_Dense(), DataLoader(torch.ones(4, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "fp4"}, "experts='fp4' must be one of fp8_rowwise, mxfp8"),
        ({"base": "16-mixed"}, "base='16-mixed' must be one of 32-true, bf16-mixed, bf16-true"),
        ({"experts": "fp8_rowwise", "scale_mode": "floor"}, "scale_mode='floor' has no effect"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEPrecision(**{**MXFP8, **options})
