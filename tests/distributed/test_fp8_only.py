"""Training without the weights beside their codes: the run that keeps them, bit for bit, for fewer bytes."""

import gc
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy, FP8Config, MoEConfig, MoEModule, MoEPrecision
from lightning_moe.nn import MoE
from lightning_moe.parallel.whole_checkpoint import read_whole
from lightning_moe.precision import ReleasedParameter
from tests.distributed.lightning_ranks import (
    Module,
    batches,
    config,
    join_lightning,
    loader,
    make_trainer,
)
from tests.ranks import run_ranks

LAYOUTS = pytest.mark.parametrize(
    ("world", "ep", "precision"),
    [
        (1, 1, "32-true"),
        (1, 1, "bf16-mixed"),
        (2, 1, "32-true"),
        (2, 1, "bf16-true"),
        (2, 2, "32-true"),
        (2, 2, "bf16-true"),
        (4, 2, "bf16-true"),
    ],
)


def _module(backend: str, fp8: FP8Config, kind: type[MoEModule] = Module) -> MoEModule:
    torch.manual_seed(0)
    whole = config()
    assert isinstance(whole.moe, MoEConfig)
    return kind(replace(whole, moe=replace(whole.moe, backend=backend, fp8=fp8)))


KEPT, ONLY = FP8Config(emulate=True), FP8Config(emulate=True, fp8_only=True)
MODES = {"kept": ("mxfp8", KEPT), "only": ("mxfp8", ONLY), "float32": ("auto", FP8Config())}


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Those of the routed experts."""
    layers = [layer for layer in module.modules() if isinstance(layer, MoE)]
    return [p for layer in layers for p in layer.experts.parameters()]


@dataclass
class Seen:
    """What a fit went through.

    Attributes:
        losses: of every micro-batch.
        validated: validation losses, in order.
        released: per micro-batch, whether any and whether all expert weights were gone.
        saved: the checkpoint written within the fit, as one process would have written it.
        weights: after the fit.
    """

    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    released: list[bool] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class _Watcher(L.Callback):
    """Fills `Seen`; saves after the optimizer step `save_at`."""

    def __init__(self, seen: Seen, path: Path, save_at: int) -> None:
        self.seen, self.path, self.save_at = seen, path, save_at

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.seen.losses.append(outputs["loss"].item())
        kinds = {type(p) for p in _weights(pl_module)}
        assert len(kinds) == 1
        self.seen.released.append(kinds == {ReleasedParameter})
        if trainer.global_step == self.save_at and not self.seen.saved:
            trainer.save_checkpoint(self.path)
            self.seen.saved = read_whole(self.path)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.validated.append(trainer.callback_metrics["val/ce"].item())


def _fit(
    rank: int,
    world: int,
    ep: int,
    mode: str,
    path: Path,
    *,
    steps: int = 3,
    load: Path | None = None,
    **options: Any,
) -> Seen:
    """Steps of two micro-batches, clipped; validation before, in the middle and at the end."""
    module, seen = _module(*MODES[mode]), Seen()
    defaults = {
        "precision": "32-true",
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
    }
    trainer = make_trainer(
        world,
        ExpertParallelStrategy(ep, timeout=120.0),
        max_steps=steps,
        callbacks=[_Watcher(seen, path, steps)],
        **(defaults | options),
    )
    validation = DataLoader(batches(rank, world, 1), batch_size=None)
    trainer.fit(module, loader(rank, world), validation, ckpt_path=load)
    seen.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return seen


def _differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where two nestings of tensors and plain values aren't equal bit for bit."""
    if isinstance(ours, Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return [] if same else [at]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{at}: {ours.keys() ^ theirs.keys()}"]
        return [d for key in ours for d in _differences(ours[key], theirs[key], f"{at}/{key}")]
    if isinstance(ours, list | tuple):
        return [
            d
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for d in _differences(*pair, f"{at}/{i}")
        ]
    return [] if ours == theirs else [at]


def _both(rank: int, world: int, ep: int, precision: str, folder: Path) -> tuple[Seen, Seen]:
    join_lightning(rank, world)
    kept, only = (
        _fit(rank, world, ep, mode, folder / mode, precision=precision) for mode in ("kept", "only")
    )
    return kept, only


@LAYOUTS
def test_losses_weights_masters_and_moments_equal_those_of_kept_weights_exactly(
    tmp_path: Path, world: int, ep: int, precision: str
) -> None:
    for kept, only in run_ranks(_both, world, ep, precision, tmp_path, timeout_s=180):
        assert only.released == [True] * 6
        assert kept.released == [False] * 6
        assert only.losses == kept.losses
        assert len(only.validated) == 2
        assert only.validated == kept.validated
        assert only.saved["state_dict"].keys() == kept.saved["state_dict"].keys()
        for part in ("state_dict", "optimizer_states"):
            assert _differences(only.saved[part], kept.saved[part]) == []
        assert _differences(only.weights, kept.weights) == []
        moments = only.saved["optimizer_states"][0]["state"]
        assert any("master" in state for state in moments.values()) == (precision == "bf16-true")


# ---- resuming --------------------------------------------------------------------------------------------------

# (mode, ep) of one step each, after the other.
CHAINS = {
    "to float32 and back": [("only", 1), ("kept", 1), ("float32", 1), ("only", 1)],
    "over expert ranks": [("only", 1), ("only", 2), ("float32", 2), ("only", 1)],
}


def _chain(
    rank: int, world: int, links: list[tuple[str, int]], precision: str, folder: Path
) -> list[Any]:
    """What lies in the checkpoint after each link."""
    join_lightning(rank, world)
    path, saved = None, []
    for step, (mode, ep) in enumerate(links, start=1):
        new = folder / f"{step}"
        seen = _fit(rank, world, ep, mode, new, steps=step, load=path, precision=precision)
        path = new
        saved.append((seen.losses, seen.saved["state_dict"], seen.saved["optimizer_states"]))
    return saved


@pytest.mark.parametrize(
    ("chain", "precision"),
    [("to float32 and back", "32-true"), ("over expert ranks", "bf16-true")],
)
def test_a_resumed_run_may_keep_its_weights_or_not_and_change_precision_and_layout_exactly(
    tmp_path: Path, chain: str, precision: str
) -> None:
    links = CHAINS[chain]
    kept = [("kept" if mode == "only" else mode, ep) for mode, ep in links]
    ours = run_ranks(_chain, 2, links, precision, tmp_path / "ours", timeout_s=180)
    theirs = run_ranks(_chain, 2, kept, precision, tmp_path / "theirs", timeout_s=180)
    assert _differences(ours, theirs) == []
    # A run that quantizes and one that doesn't part at once.
    assert ours[0][2][0] != ours[0][1][0]


# ---- memory ----------------------------------------------------------------------------------------------------


class _Weigher(L.Callback):
    """Bytes that stay for expert weights between steps, counted from storages, and all tensors as large as one."""

    def __init__(self) -> None:
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
        gc.collect()
        blocks: dict[int, int] = {}
        count, codes = 0, 0
        for layer in pl_module.moe_layers:
            codes += sum(s.nbytes for s in _stores(layer.experts))
            count += sum(p.numel() for p in layer.experts.parameters())
        weights = set(_weights(pl_module))
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
        self.large = [
            (t.dtype, tuple(t.shape))
            for t in gc.get_objects()
            if type(t) in (Tensor, nn.Parameter)
            and t.is_floating_point()
            and t.dtype.itemsize > 1
            and t.untyped_storage().nbytes() == largest * t.dtype.itemsize
        ]


def _stores(experts: Any) -> list[Any]:
    backend = experts.backend.settle(experts.sizes())
    return [backend.up_gate, backend.down]


def _weigh(rank: int, world: int, ep: int, precision: str, mode: str) -> tuple[float, list[Any]]:
    join_lightning(rank, world)
    module, weigher = _module(*MODES[mode]), _Weigher()
    trainer = make_trainer(
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


# ---- other uses ------------------------------------------------------------------------------------------------


def _evaluations(rank: int, world: int, ep: int) -> list[Any]:
    join_lightning(rank, world)
    found = []
    for mode in ("kept", "only"):
        module = _module(*MODES[mode])
        data = DataLoader(batches(rank, world, 2), batch_size=None)

        def trainer(steps: int) -> L.Trainer:
            return make_trainer(
                world,
                ExpertParallelStrategy(ep, timeout=120.0),
                max_steps=steps,
                precision="32-true",
            )

        results: list[Any] = [trainer(1).validate(module, data, verbose=False)]
        results.append(trainer(1).test(module, data, verbose=False))
        both = trainer(2)
        both.fit(module, loader(rank, world))
        results.append(both.validate(module, data, verbose=False))
        both.fit_loop.epoch_loop.max_steps = 4
        both.fit(module, loader(rank, world))
        results.append(both.test(module, data, verbose=False))
        results.append({n: t.clone() for n, t in module.state_dict().items()})
        found.append(results)
    return found


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1)])
def test_evaluation_without_a_fit_after_one_and_a_second_fit_are_the_same_exactly(
    world: int, ep: int
) -> None:
    for kept, only in run_ranks(_evaluations, world, ep, timeout_s=180):
        assert _differences(only, kept) == []


class _Reload(L.Callback):
    """Goes back to the checkpoint of the first step after the second one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        strategy = trainer.strategy
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 2:
            moved = strategy.lightning_module_state_dict()
            checkpoint = strategy.load_checkpoint(self.path)
            strategy.load_model_state_dict(checkpoint)
            strategy.load_optimizer_state_dict(checkpoint)
            back = strategy.lightning_module_state_dict()
            name = next(name for name in back if name.endswith("w_down"))
            self.found = {
                "moved": not torch.equal(moved[name], back[name]),
                "back": torch.equal(back[name], checkpoint["state_dict"][name]),
                "released": all(type(p) is ReleasedParameter for p in _weights(pl_module)),
                "output": _output(pl_module),
            }


def _output(module: MoEModule) -> Tensor:
    experts = module.moe_layers[0].experts
    counts = torch.zeros(len(experts.expert_ids), dtype=torch.int64)
    counts[0] = 2
    with torch.no_grad():
        return experts(torch.ones(2, 64, dtype=experts.w_down.dtype), counts)


def _reload(rank: int, world: int, path: Path, precision: str) -> dict[str, Any]:
    join_lightning(rank, world)
    reload = _Reload(path)
    trainer = make_trainer(
        world,
        ExpertParallelStrategy(1, timeout=120.0),
        max_steps=2,
        precision=precision,
        callbacks=[reload],
    )
    module = _module(*MODES["only"])
    trainer.fit(module, loader(rank, world))
    return reload.found | {"afterwards": _output(module)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_loaded_in_the_middle_of_a_fit_reaches_masters_and_codes(
    tmp_path: Path, precision: str
) -> None:
    for found in run_ranks(_reload, 2, tmp_path / "a.ckpt", precision, timeout_s=120):
        assert found["moved"]
        assert found["back"]
        assert found["released"]
        # From codes, and from the weights that came back.
        assert torch.equal(found["output"], found["afterwards"])


class _Manual(Module):
    """Steps by itself, after every second micro-batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def _variant(rank: int, world: int, manual: bool, **strategy: Any) -> list[str]:
    join_lightning(rank, world)
    found = []
    for mode in ("kept", "only"):
        module = _module(*MODES[mode], kind=_Manual if manual else Module)
        trainer = make_trainer(
            world,
            ExpertParallelStrategy(world, timeout=120.0, **strategy),
            precision="32-true",
            gradient_clip_val=None,
        )
        trainer.fit(module, loader(rank, world))
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return _differences(*found)


def _manual(rank: int, world: int) -> list[str]:
    return _variant(rank, world, manual=True)


def _static(rank: int, world: int) -> list[str]:
    return _variant(rank, world, manual=False, dispatcher="static", capacity_factor=1.0)


@pytest.mark.parametrize(("world", "variant"), [(1, _manual), (2, _manual), (2, _static)])
def test_manual_steps_and_static_dispatch_are_the_same_exactly(world: int, variant: Any) -> None:
    assert run_ranks(variant, world) == [[]] * world


def _frozen(rank: int, world: int) -> list[str]:
    join_lightning(rank, world)
    module = _module(*MODES["only"])
    weights = _weights(module)
    for weight in weights:
        weight.requires_grad_(False)
    before = [weight.detach().clone() for weight in weights]

    class Others(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: object) -> None:
            assert all(type(p) is ReleasedParameter for p in _weights(pl_module))

    trainer = make_trainer(
        world, ExpertParallelStrategy(1, timeout=120.0), precision="32-true", callbacks=[Others()]
    )
    trainer.fit(module, loader(rank, world))
    return _differences(before, [weight.detach() for weight in _weights(module)])


def test_frozen_weights_are_released_as_well_and_come_back_unchanged_exactly() -> None:
    assert run_ranks(_frozen, 2) == [[], []]


# ---- refusals and failures -------------------------------------------------------------------------------------


def _error(rank: int, world: int, options: dict[str, Any], strategy: dict[str, Any]) -> str:
    join_lightning(rank, world)
    if "callbacks" in options:
        kind, arguments = options["callbacks"]
        options = {"callbacks": kind(*arguments)}
    module = _module(*MODES["only"])
    trainer = make_trainer(
        world, ExpertParallelStrategy(**strategy), **({"precision": "32-true"} | options)
    )
    with pytest.raises(ValueError, match=r"model\.moe\.fp8\.fp8_only=True") as error:
        trainer.fit(module, loader(rank, world))
    assert not any(type(p) is ReleasedParameter for p in _weights(module))
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "options", "strategy", "message"),
    [
        (2, {}, {"distributed_optimizer": False}, "strategy.distributed_optimizer=False switches"),
        (1, {}, {"distributed_optimizer": False}, "strategy.distributed_optimizer=False switches"),
        (1, {"precision": "bf16-true"}, {}, "torch.bfloat16 (trainer.precision) has none"),
        (1, {"callbacks": (EMAWeightAveraging, ())}, {}, "EMAWeightAveraging averages weights"),
        (
            1,
            {"callbacks": (StochasticWeightAveraging, (0.01,))},
            {},
            "StochasticWeightAveraging aver",
        ),
    ],
)
def test_what_needs_weights_or_leaves_no_master_is_refused_in_setup_on_all_ranks(
    world: int, options: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    for error in run_ranks(_error, world, options, strategy):
        assert message in error
        assert "or set model.moe.fp8.fp8_only=false" in error


@pytest.mark.filterwarnings("ignore")  # of Lightning, about missing loaders
def test_another_strategy_is_refused_before_the_first_batch() -> None:
    trainer = make_trainer(1, "auto", precision="32-true")
    with pytest.raises(ValueError, match=r"fp8_only=True needs strategy=ExpertParallelStrategy"):
        trainer.fit(_module(*MODES["only"]), loader(0, 1))


class _Own(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(32, MoEConfig(num_experts=2, hidden_size=32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.moe(batch)[0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_your_own_is_told_at_its_first_step_that_its_strategy_keeps_weights() -> None:
    plugin = MoEPrecision("mxfp8", base="32-true", emulate=True, fp8_only=True)
    trainer = make_trainer(1, "auto", precision=None, plugins=[plugin])
    with pytest.raises(RuntimeError, match=r"fp8_only=True trains inside of Trainer\.fit with Exp"):
        trainer.fit(_Own(), DataLoader(torch.ones(4, 32), batch_size=2))


class _Breaks(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.trainer.global_step == 2:
            raise ZeroDivisionError("broken")


def _break(rank: int, world: int) -> list[str]:
    join_lightning(rank, world)
    module = _module(*MODES["only"], kind=_Breaks)
    trainer = make_trainer(
        world, ExpertParallelStrategy(1, timeout=120.0), precision="32-true", max_steps=3
    )
    with pytest.raises(ZeroDivisionError, match="broken"):
        trainer.fit(module, loader(rank, world))
    try:
        return [str(weight.isfinite().all().item()) for weight in _weights(module)]
    except RuntimeError as error:
        return [str(error)]


def test_after_a_fit_that_broke_off_weights_are_back_or_said_to_be_gone() -> None:
    assert run_ranks(_break, 1) == [["True", "True"]]
    for (message,) in run_ranks(_break, 2):
        assert "after a fit that broke off, build the module anew" in message


def _diverge(rank: int, world: int) -> str:
    join_lightning(rank, world)

    class Diverging(Module):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            masters = self.trainer.optimizers[0].param_groups[0]["params"]
            for (name, _), master in zip(self.named_parameters(), masters, strict=True):
                if name.endswith("experts.w_down"):
                    master.data.fill_(torch.inf)

    module = _module(*MODES["only"], kind=Diverging)
    module.optim = replace(module.optim, max_skipped_steps=0)
    trainer = make_trainer(
        world,
        ExpertParallelStrategy(1, timeout=120.0),
        precision="32-true",
        gradient_clip_val=None,
    )
    with pytest.raises(RuntimeError, match="non-finite gradients") as error:
        trainer.fit(module, loader(rank, world))
    return str(error.value)


def test_the_guard_still_names_weights_that_are_not_finite() -> None:
    (message,) = run_ranks(_diverge, 1)
    assert re.search(r"; non-finite weights: [\w.]+\.experts\.w_down\)", message)
