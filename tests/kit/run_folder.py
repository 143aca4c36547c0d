"""Run folders made by hand."""

from pathlib import Path

import numpy as np

METRICS = """epoch,step,train/balance_loss,train/ce,train/grad_norm,train/load_max_over_mean,\
train/load_max_over_mean/layer_0,train/loss,train/skipped_steps,train/tokens_per_second,train/z_loss,\
val/bits_per_byte,val/ce
0,0,1.5,5.25,2.0,3.0,3.0,5.5,0,1000.0,1.0,,
0,1,1.25,4.125,1.5,2.0,2.0,4.5,0,3000.0,1.0,,
0,1,,,,,,,,,,6.5,4.5
0,2,1.125,3.0625,1.25,1.75,1.75,3.5,0,5125.0,1.0,,
0,3,1.0,2.03125,1.0,1.625,1.625,2.5,1,7250.0,1.0,,
0,3,,,,,,,,,,3.875,2.6875
"""
CONFIG = """name: by_hand
trainer: {max_steps: 8, devices: 2, precision: 32-true}
model: {num_layers: 3, d_model: 24, moe: {num_experts: 4, router: {top_k: 2}}}
"""
# 2 layers, 4 experts, 2 ranks, 4 steps of 8 copies. Layer 0: expert 2 starves, expert 1 is capped at 4.
HISTORY = {
    "steps": np.arange(4),
    "requested_0": np.array([[2, 4, 0, 2], [2, 5, 0, 1], [1, 6, 0, 1], [0, 7, 0, 1]]),
    "kept_0": np.array([[2, 4, 0, 2], [2, 4, 0, 1], [1, 4, 0, 1], [0, 4, 0, 1]]),
    "rank_load_0": np.array([[6, 2], [6, 1], [5, 1], [4, 1]]),
    "balance_0": np.array([1.5, 1.25, 1.125, 0.875]),
    "margin_0": np.array([0.125, 0.25, 0.375, 0.5]),
    "entropy_0": np.array([1.25, 1.0, 0.75, 0.5]),
    "lost_tokens_0": np.array([0, 1, 0, 1]),
    "requested_1": np.full((4, 4), 2),
    "kept_1": np.full((4, 4), 2),
    "rank_load_1": np.full((4, 2), 4),
    "balance_1": np.ones(4),
    "margin_1": np.full(4, 0.0625),
    "entropy_1": np.full(4, 1.375),
    "lost_tokens_1": np.zeros(4, dtype=np.int64),
}


def make_run(
    folder: Path,
    *,
    metrics: str = METRICS,
    config: str | None = CONFIG,
    history: dict[str, np.ndarray] | None = HISTORY,
) -> Path:
    """Write the files of a run and give its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(metrics)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if history is not None:
        np.savez(folder / "routing_history.npz", **whole_history(history))
    return folder


def whole_history(some: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add what a history has besides: nothing was dropped or lost, one rank computed it all, and no mean was taken."""
    whole = {"num_steps": np.ones(len(some["steps"]), dtype=np.int64)}
    layer = 0
    while (counts := some.get(f"requested_{layer}")) is not None:
        whole |= {f"kept_{layer}": counts, f"rank_load_{layer}": counts.sum(axis=1, keepdims=True)}
        whole[f"lost_tokens_{layer}"] = np.zeros(len(counts), dtype=np.int64)
        means = ("balance", "inner", "margin", "entropy")
        whole |= {f"{name}_{layer}": np.full(len(counts), np.nan) for name in means}
        layer += 1
    return whole | some
