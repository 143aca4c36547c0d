"""Loss curve and model table: what they draw and print."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_moe import MoEModule, MoEPrecision, TransformerConfig
from lightning_moe.callbacks import LossCurve, ModelTable
from tests.kit.runs import GAMMA, make_batches, make_loader, make_module, make_trainer, tiny_config


def test_the_loss_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[LossCurve()])
    batches = make_batches([(8, 3)] * 3)
    trainer.fit(make_module(tiny_config()), make_loader(batches), make_loader(batches))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def _table(
    folder: Path, config: TransformerConfig, capsys: pytest.CaptureFixture[str], **options: object
) -> tuple[MoEModule, str]:
    """The module, and its table in one line."""
    trainer = make_trainer(folder, callbacks=[ModelTable(config, 8)], **options)
    batches = make_batches([(8, 3)])
    module = make_module(config)
    trainer.fit(module, make_loader(batches), make_loader(batches))
    # The table may break a cell over several lines.
    return module, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_table_shows_sizes_and_the_balancing_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(bias_gamma=GAMMA, lb_loss_weight=0.25)
    module, shown = _table(tmp_path, config, capsys)
    assert f"{sum(p.numel() for p in module.model.parameters()):,}" in shown
    assert "loss weight 0.25 (scope micro_batch)" in shown
    assert "0.001" in shown


def test_the_table_names_the_backends_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    # 12 numbers are a multiple of 16 bytes in float32; torch has no kernel for float64.
    for precision, backend in (("32-true", "torch"), ("64-true", "loop")):
        _, shown = _table(tmp_path, config, capsys, precision=precision)
        assert f"backend {backend} " in shown
    wide = replace(config, d_model=32, moe=replace(config.moe, hidden_size=32))
    plugin = MoEPrecision("mxfp8", base="32-true", emulate=True)
    _, shown = _table(tmp_path, wide, capsys, plugins=[plugin])
    assert "backend mxfp8 " in shown
