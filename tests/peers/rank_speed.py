"""`python -m tests.peers.rank_speed`: whole training steps on two gloo ranks, ours against torch's FSDP2 and DDP.

All variants hold equal weights (their first losses are compared), see equal tokens, and take turns in the same
processes. Ratios are medians over rounds of (other time / our time) with their range: above 1, ours is faster.
MB: of one rank's tensors, between steps and at most within a step.
"""

import argparse
import copy
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_moe.cli.process import keep_freed_memory
from lightning_moe.config import AttentionConfig, MoEConfig, RouterConfig, TransformerConfig
from lightning_moe.nn import MoETransformer
from lightning_moe.ops.cross_entropy import chunked_cross_entropy
from lightning_moe.optim.sharded import ShardedState
from lightning_moe.parallel import (
    AllToAllDispatcher,
    GradientReducer,
    MeshShape,
    ParamLayout,
    ProcessMesh,
    apply_expert_parallel,
)
from tests.kit.memory import TouchedBytes
from tests.kit.ranks import run_ranks
from tests.peers.rounds import quieten

VOCABULARY = 256
SEQUENCE = 256

FSDP_VARIANTS = {
    "fsdp": "FSDP2 as Lightning runs it",
    "fsdp_reduce_once": "FSDP2, one reduction",
    "fsdp_keep": "FSDP2, one gather and reduction",
}
"""Columns. As torch does by default and Lightning's ModelParallelStrategy always: gathers and reduces in every
micro-batch. Then: reduces in the last only; gathers once as well, with whole weights and gradients in between."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One comparison: a model, its micro-batches per step and rank, and the variants that take turns."""

    num_experts: int
    tokens: int = 1024
    micro_batches: int = 8
    d_model: int = 256
    hidden: int = 256
    layers: int = 2
    variants: tuple[str, ...] = ("ours", *FSDP_VARIANTS)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds per step of each round, and bytes of this rank's tensors: between steps, and at most within one."""

    seconds: dict[str, list[float]]
    state_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    first_loss: dict[str, float]


def model_config(setting: Setting) -> TransformerConfig:
    """A model with the same active parameters for every number of experts; 0 experts: dense."""
    experts = setting.num_experts
    return TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=setting.d_model,
        num_layers=setting.layers,
        attention=AttentionConfig(num_heads=4),
        dense_hidden_size=None if experts else 4 * setting.hidden,
        moe=MoEConfig(
            num_experts=experts,
            hidden_size=setting.hidden,
            router=RouterConfig(top_k=4, normalize_expert_weights=1.0),
        )
        if experts
        else None,
    )


class Variant(ABC):
    """A model, its optimizer, and how a step begins and ends."""

    def __init__(self, model: nn.Module, core: MoETransformer) -> None:
        self.model, self.core = model, core
        self.optimizer: torch.optim.Optimizer

    @abstractmethod
    def last(self, is_last: bool) -> None:
        """Whether the next backward reduces gradients."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """After the last backward."""

    def step(self, batches: Sequence[Tensor]) -> float:
        """One optimizer step over micro-batches of ids; the mean loss of the first."""
        self.optimizer.zero_grad()
        first = 0.0
        for i, ids in enumerate(batches):
            self.last(i == len(batches) - 1)
            hidden = self.model(ids)
            head = self.core.head_weight
            # FSDP2 hands out sharded parameters outside of a module's own forward.
            head = head.full_tensor() if hasattr(head, "full_tensor") else head
            labels = ids.roll(-1, dims=1).flatten()
            loss = chunked_cross_entropy(hidden.flatten(0, 1), head, labels).total / ids.numel()
            (loss / len(batches)).backward()
            first = loss.item() if i == 0 else first
        self.finish()
        self.optimizer.step()
        return first


class Features(nn.Module):
    """The transformer up to its head, so that every wrapper sees one forward."""

    def __init__(self, core: MoETransformer) -> None:
        super().__init__()
        self.core = core

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states."""
        return self.core.features(ids)[0]


class Ours(Variant):
    """Experts spread over the ranks, hook-launched reducer, sharded AdamW."""

    def __init__(self, core: MoETransformer, world: int) -> None:
        has_experts = core.config.moe is not None
        mesh = ProcessMesh(
            MeshShape(world=world, ep=world if has_experts else 1), timedelta(seconds=300)
        )
        apply_expert_parallel(core, mesh.shape, mesh.rank, lambda _: AllToAllDispatcher(mesh.ep))
        super().__init__(Features(core), core)
        layout = ParamLayout(self.model, mesh, split=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.sharded = ShardedState([self.optimizer], layout)
        self.reducer = GradientReducer(layout, self.sharded.targets)

    def last(self, is_last: bool) -> None:
        self.reducer.enabled = is_last

    def finish(self) -> None:
        self.reducer.finish()


class Fsdp(Variant):
    """torch's FSDP2: blocks gathered for every micro-batch or kept gathered within a step, gradients likewise."""

    def __init__(self, core: MoETransformer, *, reshard: bool, reduce_once: bool) -> None:
        super().__init__(Features(core), core)
        self.reshard, self.reduce_once = reshard, reduce_once
        for block in core.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(self.model, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def last(self, is_last: bool) -> None:
        self.model.set_requires_gradient_sync(is_last or not self.reduce_once)
        self.model.set_reshard_after_backward(self.reshard or is_last)


class Ddp(Variant):
    """torch's DistributedDataParallel, as Lightning's DDPStrategy uses it, with a whole AdamW on every rank."""

    def __init__(self, core: MoETransformer) -> None:
        super().__init__(DistributedDataParallel(Features(core)), core)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def last(self, is_last: bool) -> None:
        self.model.require_backward_grad_sync = is_last


def build(name: str, core: MoETransformer, world: int) -> Variant:
    """The variant of that name."""
    makers: dict[str, Callable[[], Variant]] = {
        "ours": lambda: Ours(core, world),
        "fsdp": lambda: Fsdp(core, reshard=True, reduce_once=False),
        "fsdp_reduce_once": lambda: Fsdp(core, reshard=True, reduce_once=True),
        "fsdp_keep": lambda: Fsdp(core, reshard=False, reduce_once=True),
        "ddp": lambda: Ddp(core),
    }
    return makers[name]()


def state(variant: Variant) -> list[Tensor]:
    """This rank's weights and optimizer state."""
    tensors: list[Any] = [*variant.model.parameters(), *variant.model.buffers()]
    for group in variant.optimizer.param_groups:
        tensors += group["params"]
        tensors += [
            value
            for parameter in group["params"]
            for value in variant.optimizer.state[parameter].values()
            if isinstance(value, Tensor)
        ]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def live_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of their memory, each block once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def peak_bytes(variant: Variant, batches: Sequence[Tensor]) -> int:
    """Bytes of all tensors that live at once within a step, weights and state included."""
    with TouchedBytes(state(variant)) as touched:
        variant.step(batches)
    return touched.peak


def measure(rank: int, world: int, setting: Setting, rounds: int) -> Measured:
    """Run on every rank: all variants, one after the other in every round."""
    keep_freed_memory()
    torch.manual_seed(0)
    core = MoETransformer(model_config(setting))
    variants = {name: build(name, copy.deepcopy(core), world) for name in setting.variants}
    generator = torch.Generator().manual_seed(rank)
    shape = (setting.tokens // SEQUENCE, SEQUENCE)
    batches = [
        torch.randint(VOCABULARY, shape, generator=generator) for _ in range(setting.micro_batches)
    ]
    first_loss = {name: variant.step(batches) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            dist.barrier()
            start = time.perf_counter()
            variant.step(batches)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return Measured(
        seconds=seconds,
        state_bytes={name: live_bytes(state(variant)) for name, variant in variants.items()},
        peak_bytes={name: peak_bytes(variant, batches) for name, variant in variants.items()},
        first_loss=first_loss,
    )


def compare(setting: Setting, rounds: int, timeout_s: float) -> Measured:
    """Measure on two ranks, and refuse to compare what doesn't compute the same.

    Raises:
        RuntimeError: if first losses differ by more than rounding.
    """
    measured: Measured = run_ranks(measure, 2, setting, rounds, timeout_s=timeout_s)[0]
    ours = measured.first_loss["ours"]
    for name, loss in measured.first_loss.items():
        if abs(loss - ours) > 1e-4 * abs(ours):
            raise RuntimeError(
                f"{name} starts with loss {loss}, ours with {ours}: not the same model"
            )
    return measured


def ratio(measured: Measured, other: str) -> str:
    """Median and range of the other's time over ours, round by round."""
    pairs = zip(measured.seconds[other], measured.seconds["ours"], strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def megabytes(measured: Measured, *names: str) -> list[str]:
    """Of each variant, between steps and at most within one."""
    return [
        f"{measured.state_bytes[name] / 1e6:.0f} / {measured.peak_bytes[name] / 1e6:.0f}"
        for name in names
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--parts", nargs="+", default=["fsdp", "flat", "dense"])
    parser.add_argument("--fsdp", nargs="+", choices=FSDP_VARIANTS, default=list(FSDP_VARIANTS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--timeout-s", type=float, default=1200.0)
    options = parser.parse_args()
    console = Console()
    sizes_of_layer = {"d_model": options.width, "hidden": options.hidden}
    if "fsdp" in options.parts:
        table = Table(
            "E",
            *(f"{FSDP_VARIANTS[name]} / ours" for name in options.fsdp),
            "MB ours",
            *(f"MB {FSDP_VARIANTS[name]}" for name in options.fsdp),
            title=f"8 x 1,024 tokens, width {options.width}, experts {options.hidden}",
        )
        for experts in options.experts:
            variants = ("ours", *options.fsdp)
            setting = Setting(num_experts=experts, variants=variants, **sizes_of_layer)
            m = compare(setting, options.rounds, options.timeout_s)
            ratios = [ratio(m, name) for name in options.fsdp]
            sizes = megabytes(m, *variants)
            table.add_row(str(experts), *ratios, *sizes)
        console.print(table)
    if "flat" in options.parts:
        table = Table("E", "tokens/s of E=8 over this E", title="4 x 8,192 tokens per rank, ours")
        base: list[float] = []
        for experts in options.experts:
            setting = Setting(num_experts=experts, tokens=8192, micro_batches=4, variants=("ours",))
            times = compare(setting, options.rounds, options.timeout_s).seconds["ours"]
            base = base or times
            ratios = [t / b for t, b in zip(times, base, strict=True)]
            table.add_row(
                str(experts),
                f"{statistics.median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]",
            )
        console.print(table)
    if "dense" in options.parts:
        setting = Setting(num_experts=0, variants=("ours", "ddp"), layers=4)
        m = compare(setting, options.rounds, options.timeout_s)
        table = Table("dense model", "DDP / ours", "MB ours", "MB DDP")
        table.add_row("4 layers", ratio(m, "ddp"), *megabytes(m, "ours", "ddp"))
        console.print(table)


if __name__ == "__main__":
    quieten()
    main()
