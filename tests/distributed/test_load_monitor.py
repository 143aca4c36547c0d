"""The load monitor over ranks: one message per entry, and the same history as on one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_moe.callbacks import ExpertLoadMonitor, read_history
from tests.kit.rank_runs import OPTIMIZERS, Recorded, batches, config, fit, parallel
from tests.kit.ranks import run_ranks

STEPS = 5


class _Messages(Recorded):
    """All-reduces of every step, from the ledger."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.mesh.ledger.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        calls = self.trainer.strategy.mesh.ledger.calls["all_reduce", "world"]
        self.messages = [*getattr(self, "messages", []), calls]


def _fit(
    rank: int, world: int, ep: int, folder: str, options: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    torch.manual_seed(0)
    module = (_Messages if world > 1 else Recorded)(config(), OPTIMIZERS["sgd"])
    fit(
        rank,
        world,
        module,
        batches(rank, world, steps=STEPS),
        strategy=parallel(ep, **options) if world > 1 else "auto",
        default_root_dir=folder,
        callbacks=[ExpertLoadMonitor(every_n_steps=2)],
    )
    values = {name: value.item() for name, value in module.trainer.callback_metrics.items()}
    return getattr(module, "messages", []), values


def _history(tmp_path: Path, world: int, ep: int, **options: Any) -> dict[str, Any]:
    folder = tmp_path / f"{world}-{ep}"
    results = run_ranks(_fit, world, ep, str(folder), options, timeout_s=120)
    return {"results": results, **read_history(folder / "routing_history.npz")}


def test_ranks_send_one_message_per_entry_and_none_between(tmp_path: Path) -> None:
    for messages, _ in _history(tmp_path, 2, 2)["results"]:
        rest = messages[2]
        assert messages[1:] == [rest + 1, rest, rest + 1, rest]


@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_have_the_history_of_one(tmp_path: Path, ep: int) -> None:
    alone, ours = _history(tmp_path, 1, 1), _history(tmp_path, 2, ep)
    for layer in range(2):
        for name in ("requested", "kept"):
            np.testing.assert_array_equal(ours[f"{name}_{layer}"], alone[f"{name}_{layer}"])
        for name in ("balance", "inner", "margin", "entropy"):
            np.testing.assert_allclose(
                ours[f"{name}_{layer}"], alone[f"{name}_{layer}"], rtol=1e-9, atol=1e-12
            )
        loads, requested = ours[f"rank_load_{layer}"], ours[f"requested_{layer}"]
        if ep == 2:
            halves = [requested[:, :2].sum(axis=1), requested[:, 2:].sum(axis=1)]
            np.testing.assert_array_equal(loads, np.stack(halves, axis=1))
        else:
            np.testing.assert_array_equal(loads.sum(axis=1), requested.sum(axis=1))
            assert (loads[:, 0] != loads[:, 1]).any()  # each computes its own tokens
    for _, logged in ours["results"]:
        ratios = [
            loads[1].max() * 2 / loads[1].sum()
            for loads in (ours["rank_load_0"], ours["rank_load_1"])
        ]
        assert logged["train/rank_load_max_over_mean"] == pytest.approx(max(ratios))


def test_replicas_of_experts_are_ranks_of_their_own(tmp_path: Path) -> None:
    history = _history(tmp_path, 4, 2)
    for layer in range(2):
        loads, requested = history[f"rank_load_{layer}"], history[f"requested_{layer}"]
        # Ranks 0 and 2 hold experts 0 and 1, ranks 1 and 3 the others.
        np.testing.assert_array_equal(loads[:, [0, 2]].sum(axis=1), requested[:, :2].sum(axis=1))
        np.testing.assert_array_equal(loads[:, [1, 3]].sum(axis=1), requested[:, 2:].sum(axis=1))
        assert (loads[:, 0] != loads[:, 2]).any()


def test_drops_of_the_static_dispatcher_are_counted(tmp_path: Path) -> None:
    history = _history(tmp_path, 2, 2, dispatcher="static", capacity_factor=0.2)
    _, logged = history["results"][0]
    requested, kept = history["requested_0"][1].sum(), history["kept_0"][1].sum()
    assert 0 < kept < requested
    assert logged["train/dropped_routes/layer_0"] == pytest.approx((requested - kept) / requested)
    lost, tokens = history["lost_tokens_0"][1], requested / 2
    assert logged["train/lost_tokens/layer_0"] == pytest.approx(lost / tokens)
    assert lost > 0
