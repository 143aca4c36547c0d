"""Loss curve and model table: what they draw and print."""

from pathlib import Path

import pytest

from lightning_moe.callbacks import LossCurve, ModelTable
from tests.e2e.runs import GAMMA, make_batches, make_loader, make_module, make_trainer, tiny_config


def test_the_loss_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[LossCurve()])
    batches = make_batches([(8, 3)] * 3)
    trainer.fit(make_module(tiny_config()), make_loader(batches), make_loader(batches))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_sizes_and_the_balancing_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(bias_gamma=GAMMA, lb_loss_weight=0.25)
    trainer = make_trainer(tmp_path, callbacks=[ModelTable(config, 8)])
    batches = make_batches([(8, 3)])
    module = make_module(config)
    trainer.fit(module, make_loader(batches), make_loader(batches))
    # The table may break a cell over several lines.
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{sum(p.numel() for p in module.model.parameters()):,}" in shown
    assert "loss weight 0.25 (scope micro_batch)" in shown
    assert "0.001" in shown
