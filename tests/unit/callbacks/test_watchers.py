"""Load monitor, loss curve and model table: what they log, draw and print."""

from pathlib import Path

import pytest

from lightning_moe.callbacks import ExpertLoadMonitor, LossCurve, ModelTable
from tests.e2e.own_modules import Recording, Scripted
from tests.e2e.runs import GAMMA, make_batches, make_loader, make_module, make_trainer, tiny_config

COUNTS = [[4, 0, 0, 4], [0, 8, 0, 0], [1, 1, 1, 1]]
PNG = b"\x89PNG"


def _fit(folder: Path, module: Recording, num_batches: int, **options: object) -> dict[str, float]:
    trainer = make_trainer(folder, **options)
    trainer.fit(module, make_loader(make_batches([(8, 3)] * num_batches)))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_the_load_is_that_of_the_busiest_expert_over_the_mean_of_the_whole_step(
    tmp_path: Path,
) -> None:
    monitor = ExpertLoadMonitor(write_files=False)
    options = {"callbacks": [monitor], "accumulate_grad_batches": 2}
    # Sums 4, 8, 0, 4 around a mean of 4, though each micro-batch by itself is more uneven.
    logged = _fit(tmp_path, Scripted(COUNTS[:2]), 2, **options)
    assert logged["train/load_max_over_mean"] == 2.0
    assert logged["train/load_max_over_mean/layer_0"] == 2.0


def test_the_worst_layer_of_the_step_is_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(
        make_module(tiny_config(bias_gamma=GAMMA)),
        make_loader(make_batches([(8, 3)])),
        make_loader(make_batches([(8, 3)])),
    )
    logged = trainer.callback_metrics
    layers = [logged[f"train/load_max_over_mean/layer_{layer}"] for layer in range(2)]
    assert logged["train/load_max_over_mean"] == max(layers)
    assert layers[0] != layers[1]


def test_a_heat_map_is_drawn_at_the_end(tmp_path: Path) -> None:
    _fit(tmp_path, Scripted(COUNTS), 3, callbacks=[ExpertLoadMonitor()])
    assert (tmp_path / "expert_load.png").read_bytes().startswith(PNG)


def test_a_fit_without_a_step_draws_nothing(tmp_path: Path) -> None:
    _fit(tmp_path, Scripted(COUNTS), 3, callbacks=[ExpertLoadMonitor()], max_steps=0)
    assert not (tmp_path / "expert_load.png").exists()


def test_a_window_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="recent_steps=0 must be a whole number, at least 1"):
        ExpertLoadMonitor(recent_steps=0)


def test_the_loss_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[LossCurve()])
    batches = make_batches([(8, 3)] * 3)
    trainer.fit(make_module(tiny_config()), make_loader(batches), make_loader(batches))
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


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
