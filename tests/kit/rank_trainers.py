"""Lightning on ranks that exist already: training a tiny model, and its whole state wherever parts of it live."""

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import (
    AttentionConfig,
    ExpertParallelStrategy,
    MoEConfig,
    MoEModule,
    RouterConfig,
    SharedExpertConfig,
    TokenBatch,
    TransformerConfig,
)
from tests.kit.runs import make_trainer

NUM_EXPERTS = 4
VOCAB_SIZE = 32
ROWS = 8  # per step, over all ranks


def torchrun_variables(rank: int, world: int) -> dict[str, str]:
    """What torchrun tells its processes, so that Lightning starts none of its own."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the group of these ranks exists already, or never will
        "TORCHELASTIC_RUN_ID": "tests",
    }


def join_lightning(rank: int, world: int) -> None:
    """Make this rank look like a process of torchrun, and Lightning quiet."""
    # Else Lightning gives a single rank all cores, whose threads wait for each other on a busy machine.
    os.environ["OMP_NUM_THREADS"] = "1"
    if world > 1:
        os.environ |= torchrun_variables(rank, world)
    # Lightning's advice to users would bury what a failing rank says.
    warnings.filterwarnings("ignore")
    for name in list(logging.root.manager.loggerDict):
        if "lightning" in name:
            logging.getLogger(name).setLevel(logging.ERROR)


def config() -> TransformerConfig:
    """Large enough for the optimizer to split some parameters over replicas, and not others."""
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        num_layers=1,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(
            num_experts=NUM_EXPERTS,
            hidden_size=32,
            shared=SharedExpertConfig(hidden_size=16),
            router=RouterConfig(
                top_k=2,
                lb_loss_weight=0.1,
                lb_loss_scope="lagged",
                z_loss_weight=1e-2,
                bias_gamma=1e-2,
            ),
        ),
    )


class Module(MoEModule):
    """One AdamW group for everything."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_module(seed: int = 0, kind: type[MoEModule] = Module, **options: object) -> MoEModule:
    torch.manual_seed(seed)
    return kind(config(), **options)


def batches(rank: int, world: int, num_batches: int = 8) -> list[TokenBatch]:
    """This rank's rows of the same global batches, however many ranks there are."""
    generator = torch.Generator().manual_seed(1)
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    made = []
    for _ in range(num_batches):
        ids = torch.randint(VOCAB_SIZE, (ROWS, 9), generator=generator)[rows]
        made.append(TokenBatch(ids_BS=ids[:, :-1].contiguous(), labels_BS=ids[:, 1:].contiguous()))
    return made


class Resumable(DataLoader[TokenBatch]):
    """Goes on after the batch it had given when it was saved."""

    given = 0
    first = 0

    def __iter__(self) -> Iterator[TokenBatch]:
        for i, batch in enumerate(super().__iter__()):
            if i >= self.first:
                self.given = i + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["given"]


def loader(rank: int, world: int) -> Resumable:
    return Resumable(batches(rank, world), batch_size=None)


def rank_trainer(world: int, strategy: object = None, **options: object) -> L.Trainer:
    """For ranks that are there already; in float64 unless told otherwise; batches stay as they are."""
    defaults = {
        "devices": world,
        "strategy": strategy if strategy is not None else ExpertParallelStrategy(),
        "max_epochs": None,
        "max_steps": 3,
        "log_every_n_steps": 50,
        "gradient_clip_val": 0.05,
        "use_distributed_sampler": False,
        "precision": "64-true",
    }
    return make_trainer(**(defaults | options))


@dataclass
class Plan:
    """One fit: with what, from where, until when, and where to."""

    ep: int = 1
    steps: int = 3
    load: Path | None = None
    save: Path | None = None
    distributed_optimizer: bool = True
    precision: str = "64-true"
    plain: bool = False  # Lightning's own single-device strategy
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class State:
    """Whole weights, and whole moments and masters as flat tensors, by parameter name."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    step: int


def run_plans(rank: int, world: int, plans: list[Plan]) -> list[State]:
    """The state after each fit, in one process per rank."""
    join_lightning(rank, world)
    return [_run(rank, world, plan) for plan in plans]


def _run(rank: int, world: int, plan: Plan) -> State:
    strategy: Any = (
        "auto"
        if plan.plain
        else ExpertParallelStrategy(plan.ep, distributed_optimizer=plan.distributed_optimizer)
    )
    module = make_module(plan.seed)
    if plan.precision == "64-true":
        module = module.double()
    trainer = rank_trainer(
        world, strategy, max_steps=plan.steps, precision=plan.precision, **plan.options
    )
    trainer.fit(module, loader(rank, world), ckpt_path=plan.load)
    if plan.save is not None:
        trainer.save_checkpoint(plan.save)
    return whole_state(trainer, world, 1 if plan.plain else plan.ep)


def whole_state(trainer: L.Trainer, world: int, ep: int) -> State:
    """Put together from what each rank holds, without the code that writes checkpoints."""
    module = trainer.lightning_module
    everyone = _gather(
        world,
        {name: value.detach().clone() for name, value in module.state_dict().items()},
    )
    weights = {
        name: torch.cat([everyone[rank][name] for rank in range(ep)])
        if ".experts." in name
        else value
        for name, value in everyone[0].items()
    }
    return State(weights, _whole_moments(trainer, world, ep), trainer.global_step)


def _whole_moments(trainer: L.Trainer, world: int, ep: int) -> dict[str, dict[str, Tensor]]:
    if not trainer.optimizers:
        return {}
    optimizer = trainer.optimizers[0]
    names = [name for name, _ in trainer.lightning_module.named_parameters()]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {}
    for name, parameter in zip(names, parameters, strict=True):
        own[name] = {key: value.clone() for key, value in optimizer.state[parameter].items()}
        if (
            parameter.dtype
            == torch.float32
            != dict(trainer.lightning_module.named_parameters())[name].dtype
        ):
            own[name]["master"] = parameter.detach()
    everyone = _gather(world, own)
    whole: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainer.lightning_module.named_parameters():
        shards = ep if ".experts." in name else 1
        for key, value in own[name].items():
            if value.dim() == 0:
                whole.setdefault(name, {})[key] = value
                continue
            split = value.numel() < parameter.numel()
            order = [
                shard + replica * shards
                for shard in range(shards)
                for replica in range(world // shards if split else 1)
            ]
            parts = [everyone[rank][name][key].flatten() for rank in order]
            whole.setdefault(name, {})[key] = torch.cat(parts)
    return whole


def _gather(world: int, own: object) -> list[Any]:
    if world == 1:
        return [own]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    return everyone
