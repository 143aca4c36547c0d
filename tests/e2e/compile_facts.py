"""What compiled models compute, as JSON: a process of its own, since the shape checker can't be traced."""

import copy
import json
import logging
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_moe import ExpertParallelStrategy, MoEModule
from lightning_moe.config import (
    AttentionConfig,
    Compile,
    LayerConfig,
    LinearFormat,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoE, MoETransformer, Routing, balance_loss, z_loss
from lightning_moe.precision import LinearRecipe
from lightning_moe.strategy.linears import LinearSwap
from tests.kit import rank_trainers
from tests.kit.ranks import run_ranks
from tests.kit.runs import make_batches, make_loader, make_trainer, tiny_config
from tests.kit.spread_layers import connect, spread

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "block": {"recompute": "block"},
    "moe": {"recompute": "moe", "offload_activations": True},
    "attention": {"recompute": "attention"},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build(dtype: torch.dtype = torch.float32, **options: Any) -> MoETransformer:
    """A dense layer and two MoE layers, one with a window."""
    torch.manual_seed(0)
    router = RouterConfig(top_k=2, z_loss_weight=0.1, score_correction_bias=True)
    moe = MoEConfig(
        num_experts=4, hidden_size=8, router=router, shared=SharedExpertConfig(hidden_size=8)
    )
    defaults = {
        "num_layers": 3,
        "d_model": 16,
        "moe": moe,
        "layer_overrides": {0: LayerConfig(dense_hidden_size=24)},
    }
    config = TransformerConfig(
        vocab_size=11,
        attention=AttentionConfig(num_heads=2, qk_norm="head"),
        **{**defaults, **options},
    )
    return MoETransformer(config).to(dtype)


def build_eight_bits(linears: LinearFormat, compile_backend: Compile) -> MoETransformer:
    """The same, as wide as every eight-bit format needs it, with linear layers that compute in one."""
    moe = MoEConfig(
        num_experts=4,
        hidden_size=8,
        router=RouterConfig(top_k=2, z_loss_weight=0.1),
        shared=SharedExpertConfig(hidden_size=32),
    )
    overrides = {0: LayerConfig(dense_hidden_size=32)}
    model = build(d_model=32, moe=moe, layer_overrides=overrides, compile=compile_backend)
    LinearSwap(LinearRecipe(name=linears, emulate=True)).swap(model)
    return model


def step(model: MoETransformer, ids: Tensor) -> list[Tensor]:
    """Loss, records and gradients."""
    model.zero_grad()
    logits, records = model(ids, valid_BS=ids > 0)
    loss = logits.logsumexp(dim=-1).sum() + balance_loss(records) + z_loss(records)
    loss.backward()
    return [loss.detach(), *_facts(records), *(p.grad.clone() for p in model.parameters())]


def _facts(records: list[Routing]) -> Iterator[Tensor]:
    for record in records:
        values = (getattr(record, field.name) for field in fields(Routing))
        yield from (value.detach() for value in values if isinstance(value, Tensor))


def apart(ours: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference relative to each tensor's largest entry."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(ours, expected, strict=True)
    )


def _one_process() -> dict[str, Any]:
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    facts: dict[str, Any] = {"apart": {}, "breaks": {}, "choices": {}}
    for name, dtype in DTYPES.items():
        expected = step(build(dtype), ids)
        for way in WAYS if dtype == torch.float32 else ("moe",):
            options = WAYS[way]
            torch._dynamo.reset()
            counters.clear()
            model = build(dtype, compile="aot_eager", **options)
            found = step(model, ids)
            facts["apart"][f"{name}, {way}"] = apart(found, expected)
            facts["breaks"][f"{name}, {way}"] = sum(counters["graph_break"].values())
            if dtype == torch.float32:
                facts["choices"][way] = _choices(model, ids)
    formats: tuple[LinearFormat, ...] = ("fp8_rowwise", "mxfp8")
    for linears in formats:
        expected = step(build_eight_bits(linears, "none"), ids)
        torch._dynamo.reset()
        counters.clear()
        found = step(build_eight_bits(linears, "aot_eager"), ids)
        facts["apart"][f"float32, {linears}"] = apart(found, expected)
        facts["breaks"][f"float32, {linears}"] = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    model = build(compile="aot_eager")
    facts["same_keys"] = list(model.state_dict()) == list(build().state_dict())
    for length in (6, 3, 1, 5, 9, 2, 8):
        step(model, torch.ones(2, length, dtype=torch.int64))
    facts["graphs"] = counters["stats"]["unique_graphs"]
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        model.embedding.weight.zero_()
    expected = step(build(), ids)
    facts["copies_apart"] = max(apart(step(twin, ids), expected) for twin in twins)
    torch._dynamo.reset()
    small = {"num_layers": 1, "layer_overrides": {}, "recompute": "moe"}
    expected = step(build(**small), ids)
    facts["inductor_apart"] = apart(step(build(compile="inductor", **small), ids), expected)
    facts["first_read_apart"] = _first_read()
    return facts


def _first_read() -> float:
    """Of a layer whose weights have no memory before compiled code reads them, and one that runs as it is."""
    x_TD = torch.linspace(-1, 1, 36).view(3, 12)
    outputs = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        layer = MoE(12, MoEConfig(num_experts=4, hidden_size=8, router=RouterConfig(top_k=2)))
        run = layer if backend is None else torch.compile(layer, backend=backend)
        outputs.append(run(x_TD)[0].detach())
    return apart(outputs[1:], outputs[:1])


def _logged() -> list[str]:
    """What a Trainer says about compiling in two epochs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    torch._dynamo.reset()
    module = MoEModule(replace(tiny_config(), compile="aot_eager"))
    batches = make_batches([(8, 3), (1, 5)])
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(Path(folder), max_epochs=2).fit(module, make_loader(batches))
    return [line for line in lines if "compil" in line]


def _choices(model: MoETransformer, ids: Tensor) -> int:
    """How often experts are chosen in one step."""
    with torch.profiler.profile() as profile:
        step(model, ids)
    return sum(event.name == "aten::topk" for event in profile.events())


def _rank(rank: int, world: int) -> dict[str, Any]:
    """Spread over ranks: compiled against not compiled."""
    mesh, _ = connect(world)
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1 + rank))
    facts: dict[str, Any] = {"apart": {}, "breaks": {}}
    for dispatcher in ("static", "all_to_all"):
        # Another batch comes first, since with it the static dispatcher fixes its shapes.
        first = ids.flip(1)
        plain = spread(build(), mesh, dispatcher)
        step(plain, first)
        expected = step(plain, ids)
        for way in ("none", "moe"):
            options = WAYS[way]
            torch._dynamo.reset()
            model = spread(build(compile="aot_eager", **options), mesh, dispatcher)
            step(model, first)
            torch._dynamo.reset()
            counters.clear()
            found = step(model, ids)
            facts["apart"][f"{dispatcher}, {way}"] = apart(found, expected)
            facts["breaks"][f"{dispatcher}, {way}"] = sum(counters["graph_break"].values())
    return facts


class _Save(L.Callback):
    """Saves in the middle of the epoch, after two of four steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.fit_loop.batch_idx == 3:
            trainer.save_checkpoint(self.path)


def _train_exact(
    rank: int, world: int, way: str, save: Path | None = None, load: Path | None = None
) -> list[Tensor]:
    """This rank's weights after four steps of two micro-batches, with noise in the choice of experts."""
    torch._dynamo.reset()
    small = rank_trainers.config()
    assert small.moe is not None
    router = replace(small.moe.router, lb_loss_scope="exact", lb_loss_weight=1.0, jitter_eps=0.2)
    torch.manual_seed(0 if load is None else 5)
    module = rank_trainers.Module(
        replace(small, compile=way, moe=replace(small.moe, router=router))
    )
    trainer = rank_trainers.rank_trainer(
        world,
        ExpertParallelStrategy(world),
        max_steps=4,
        accumulate_grad_batches=2,
        precision="32-true",
        callbacks=[] if save is None else [_Save(save)],
    )
    trainer.fit(module, rank_trainers.loader(rank, world), ckpt_path=load)
    assert trainer.global_step == 4
    return [value.clone() for value in module.state_dict().values()]


def _exact(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The balance scope that looks ahead: a resumed run against a straight one, and compiled against not."""
    rank_trainers.join_lightning(rank, world)
    straight, resumed_apart = {}, {}
    for way in ("none", "aot_eager"):
        straight[way] = _train_exact(rank, world, way, save=folder / way)
        resumed = _train_exact(rank, world, way, load=folder / way)
        resumed_apart[way] = apart(resumed, straight[way])
    return {
        "resumed_apart": resumed_apart,
        "compiled_apart": apart(straight["aot_eager"], straight["none"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        exact = run_ranks(_exact, 2, Path(folder), timeout_s=300)
    print(
        json.dumps(
            {
                "one": _one_process(),
                "ranks": run_ranks(_rank, 2, timeout_s=300),
                "exact": exact,
                "logged": _logged(),
            }
        )
    )
