"""Training without the weights beside their codes: what stays in memory."""

import gc
import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_moe import ExpertParallelStrategy
from tests.kit.fp8_only_runs import expert_weights, module_in
from tests.kit.rank_trainers import (
    join_lightning,
    loader,
    rank_trainer,
)
from tests.kit.ranks import run_ranks


class _Weigher(L.Callback):
    """Bytes that stay for expert weights between steps, counted from storages, and all tensors as large as one."""

    def __init__(self, *, expects_none: bool) -> None:
        self.expects_none = expects_none
        self.per_weight = 0.0
        self.large: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        if trainer.global_step < trainer.max_steps:
            return
        strategy: Any = trainer.strategy
        optimizer = trainer.optimizers[0]
        optimizer.zero_grad()
        blocks: dict[int, int] = {}
        count, codes = 0, 0
        for layer in pl_module.moe_layers:
            codes += sum(s.nbytes for s in _stores(layer.experts))
            count += sum(p.numel() for p in layer.experts.parameters())
        weights = set(expert_weights(pl_module))
        for name, weight in strategy.layout.parameters.items():
            if weight in weights:
                target = weight
                if strategy.sharded is not None:
                    target = strategy.sharded.targets.get(name, weight)
                moments = [v for v in optimizer.state[target].values() if v.dim()]
                for tensor in (weight, target, *moments):
                    block = tensor.untyped_storage()
                    blocks[block._cdata] = block.nbytes()
        self.per_weight = (codes + sum(blocks.values())) / count
        largest = max(weight.numel() for weight in weights)
        self.large = _as_large(largest)
        # A thread of gloo can let go of a message after it has arrived.
        deadline = time.monotonic() + (10 if self.expects_none else 0)
        while self.large and time.monotonic() < deadline:
            time.sleep(0.05)
            self.large = _as_large(largest)


def _as_large(numel: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    gc.collect()
    return [
        (t.dtype, tuple(t.shape))
        for t in gc.get_objects()
        if type(t) in (Tensor, nn.Parameter)
        and t.is_floating_point()
        and t.dtype.itemsize > 1
        and t.untyped_storage().nbytes() == numel * t.dtype.itemsize
    ]


def _stores(experts: Any) -> list[Any]:
    backend = experts.backend.settle(experts.sizes())
    return [backend.up_gate, backend.down]


def _weigh(rank: int, world: int, ep: int, precision: str, mode: str) -> tuple[float, list[Any]]:
    join_lightning(rank, world)
    module, weigher = module_in(mode), _Weigher(expects_none=mode == "only" and ep == 1)
    trainer = rank_trainer(
        world,
        ExpertParallelStrategy(ep, timeout=120.0),
        max_steps=2,
        precision=precision,
        callbacks=[weigher],
    )
    trainer.fit(module, loader(rank, world))
    return weigher.per_weight, weigher.large


@pytest.mark.parametrize(
    ("ep", "precision", "mode", "expected"),
    [
        # Of a weight: itself, its codes, its master unless it is one, two moments; from the master on over 2 replicas.
        (1, "32-true", "kept", 4 + 2 * 33 / 32 + 8 / 2),
        (1, "32-true", "only", 2 * 33 / 32 + 4 / 2 + 8 / 2),
        (1, "bf16-true", "kept", 2 + 2 * 33 / 32 + 4 / 2 + 8 / 2),
        (1, "bf16-true", "only", 2 * 33 / 32 + 4 / 2 + 8 / 2),
        (2, "bf16-true", "only", 2 * 33 / 32 + 4 + 8),
    ],
)
def test_codes_masters_and_moments_are_all_that_stays_of_a_weight(
    ep: int, precision: str, mode: str, expected: float
) -> None:
    for per_weight, large in run_ranks(_weigh, 2, ep, precision, mode, timeout_s=120):
        # One element per released weight.
        assert per_weight == pytest.approx(expected, abs=1e-3)
        if mode == "only" and ep == 1:
            assert large == []
