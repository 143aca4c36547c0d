"""No rank ever holds more of a model than its own part, from building it to training it."""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_moe import (
    AttentionConfig,
    ExpertParallelStrategy,
    MoEConfig,
    MoEModule,
    RouterConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoE, moe_layers
from tests.kit.memory import LiveBytes
from tests.kit.rank_runs import whole_weights
from tests.kit.rank_trainers import VOCAB_SIZE, join_lightning, loader, rank_trainer
from tests.kit.ranks import run_ranks

MOE = MoEConfig(num_experts=32, hidden_size=64, router=RouterConfig(top_k=2))
CONFIG = TransformerConfig(
    vocab_size=VOCAB_SIZE,
    d_model=64,
    num_layers=3,
    attention=AttentionConfig(num_heads=2),
    moe=MOE,
)
LAYER_BYTES = 32 * 3 * 64 * 64 * 4


class _Watcher(L.Callback):
    """Looks for layers in `setup`, and at the counted bytes before the first batch."""

    def __init__(self, watch: LiveBytes) -> None:
        self.watch = watch
        self.num_experts: list[int] = []
        self.peak = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.num_experts = [len(layer.experts.expert_ids) for layer in moe_layers(pl_module)]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peak = self.watch.peak


class _Own(L.LightningModule):
    """A user's own module, with the layer built in `__init__` or in `configure_model`."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.moe = None if late else MoE(64, MOE)

    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoE(64, MOE)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y, _ = self.moe(batch)
        return y.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _build_and_train(rank: int, world: int, ep: int) -> tuple[int, int, list[int]]:
    """Most bytes at once before the first batch, bytes of this rank's weights, experts seen in `setup`."""
    join_lightning(rank, world)
    with LiveBytes() as watch:
        torch.manual_seed(0)
        module = MoEModule(CONFIG)
        watcher = _Watcher(watch)
        trainer = rank_trainer(
            world,
            ExpertParallelStrategy(ep),
            max_steps=1,
            precision="32-true",
            callbacks=[watcher],
        )
        trainer.fit(module, loader(rank, world))
    own = sum(p.numel() * p.element_size() for p in module.parameters())
    return watcher.peak, own, watcher.num_experts


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_building_a_model_takes_little_more_than_a_ranks_own_weights(ep: int) -> None:
    for peak, own, num_experts in run_ranks(_build_and_train, 4, ep):
        assert num_experts == [32 // ep] * 3
        assert own <= peak <= 1.1 * own + LAYER_BYTES / ep


def _initial_weights(rank: int, world: int, ep: int) -> dict[str, Tensor]:
    join_lightning(rank, world)
    torch.manual_seed(0)
    module = MoEModule(CONFIG)
    strategy = ExpertParallelStrategy(ep)
    trainer = rank_trainer(world, strategy, max_steps=0, precision="32-true")
    trainer.fit(module, loader(rank, world))
    return whole_weights(module, strategy)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_initial_weights_are_those_of_one_process(ep: int) -> None:
    torch.manual_seed(0)
    expected = MoEModule(CONFIG).state_dict()
    for weights in run_ranks(_initial_weights, 4, ep):
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name


def _own(rank: int, world: int, late: bool) -> tuple[int, int]:
    join_lightning(rank, world)
    batches = [torch.randn(4, 64) for _ in range(2)]
    trainer = rank_trainer(world, ExpertParallelStrategy("auto"), max_steps=1, precision="32-true")
    module = _Own(late=late)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer.strategy.mesh.shape.ep, len(module.moe.experts.expert_ids)


@pytest.mark.parametrize("late", [False, True])
def test_auto_shares_out_the_layers_of_a_module_of_ones_own_wherever_it_builds_them(
    late: bool,
) -> None:
    assert run_ranks(_own, 2, late) == [(2, 16), (2, 16)]


def _in_pieces(rank: int, world: int, folder: Path) -> bool:
    """Whether a rank's own weights after loading are those that were saved."""
    join_lightning(rank, world)
    with torch.device("meta"):
        module = MoEModule(CONFIG)
    trainer = rank_trainer(world, ExpertParallelStrategy(2), max_steps=1, precision="32-true")
    trainer.fit(module, loader(rank, world))
    return not any(p.is_meta for p in module.parameters())


def test_a_module_that_was_built_on_the_meta_device_gets_memory_on_ranks(tmp_path: Path) -> None:
    assert run_ranks(_in_pieces, 2, tmp_path) == [True, True]
