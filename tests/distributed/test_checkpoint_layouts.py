"""A checkpoint doesn't know how many ranks wrote it: it goes on at any other number as if nothing had happened."""

import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor

from lightning_moe import ExpertParallelStrategy, load_weights
from lightning_moe.checkpoint.whole import read_whole
from tests.kit.rank_trainers import (
    NUM_EXPERTS,
    Module,
    Plan,
    State,
    config,
    join_lightning,
    loader,
    make_module,
    rank_trainer,
    run_plans,
    whole_state,
)
from tests.kit.ranks import run_ranks

Case = tuple[str, int, int, bool, str]  # name, ranks, ep, distributed optimizer, precision

# Every number of ranks and of expert ranks that 4 experts allow, and the ways to keep optimizer state.
CASES: list[Case] = [
    ("1", 1, 1, True, "64-true"),
    ("2ep1", 2, 1, True, "64-true"),
    ("2ep2", 2, 2, True, "64-true"),
    ("2ep2-whole", 2, 2, False, "64-true"),
    ("4ep1", 4, 1, True, "64-true"),
    ("4ep2", 4, 2, True, "64-true"),
    ("4ep2-whole", 4, 2, False, "64-true"),
    ("4ep4", 4, 4, True, "64-true"),
]
LOADERS = [case for case in CASES if "whole" not in case[0]]
NARROW: list[Case] = [
    ("2ep2-bf16", 2, 2, True, "bf16-true"),
    ("4ep2-bf16", 4, 2, True, "bf16-true"),
]


@dataclass
class Matrix:
    straight: State
    narrow_straight: State
    halfway: dict[str, State]
    resumed: dict[tuple[str, str], State]


def _run_all(plans: dict[Any, tuple[int, Plan]]) -> dict[Any, State]:
    """One start of the ranks for all plans with the same number of them."""
    done: dict[Any, State] = {}
    ordered = sorted(plans.items(), key=lambda item: item[1][0])
    for world, group in groupby(ordered, key=lambda item: item[1][0]):
        items = list(group)
        states = run_ranks(run_plans, world, [plan for _, (_, plan) in items], timeout_s=240)[0]
        done |= {key: state for (key, _), state in zip(items, states, strict=True)}
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def matrix(folder: Path) -> Matrix:
    """Three steps at each layout, then three more from each of these at every other; and six in one go."""
    first: dict[Any, tuple[int, Plan]] = {
        "straight": (1, Plan(steps=6)),
        "narrow straight": (2, Plan(ep=2, steps=6, precision="bf16-true")),
        "plain": (1, Plan(plain=True, save=folder / "plain.ckpt")),
    }
    for name, world, ep, split, precision in CASES + NARROW:
        first[name] = (
            world,
            Plan(
                ep, save=folder / f"{name}.ckpt", distributed_optimizer=split, precision=precision
            ),
        )
    halfway = _run_all(first)
    _consolidate(folder / "2ep2.ckpt", folder / "consolidated.ckpt")
    narrow = _load_distributed_checkpoint(folder / "2ep2-bf16.ckpt")
    torch.save(narrow, folder / "consolidated-bf16.ckpt")
    sources = [name for name, *_ in CASES] + ["plain", "consolidated"]
    # Other initial weights (seed 7): all must come from the file.
    second: dict[Any, tuple[int, Plan]] = {
        (source, name): (world, Plan(ep, 6, folder / f"{source}.ckpt", None, split, seed=7))
        for source in sources
        for name, world, ep, split, _ in LOADERS
    }
    second |= {
        (source, name): (
            world,
            Plan(ep, 6, folder / f"{source}.ckpt", precision="bf16-true", seed=7),
        )
        for source in ("2ep2-bf16", "4ep2-bf16", "consolidated-bf16")
        for name, world, ep, *_ in NARROW
    }
    resumed = _run_all(second)
    return Matrix(halfway.pop("straight"), halfway.pop("narrow straight"), halfway, resumed)


def _consolidate(source: Path, target: Path) -> None:
    command = ["-m", "lightning.fabric.utilities.consolidate_checkpoint", str(source)]
    subprocess.run([sys.executable, *command, "--output_file", str(target)], check=True)


def _assert_same(got: State, expected: State, **tolerance: float) -> None:
    assert got.step == expected.step
    torch.testing.assert_close(got.weights, expected.weights, **tolerance)
    torch.testing.assert_close(got.moments, expected.moments, **tolerance)


@pytest.mark.parametrize("target", [name for name, *_ in LOADERS])
@pytest.mark.parametrize("source", [*[name for name, *_ in CASES], "plain", "consolidated"])
def test_three_steps_after_loading_equal_an_uninterrupted_run(
    matrix: Matrix, source: str, target: str
) -> None:
    got = matrix.resumed[source, target]
    # Sums over ranks have another order, and AdamW divides by small square roots.
    _assert_same(got, matrix.straight, rtol=1e-9, atol=1e-12)


def test_a_narrow_run_resumes_exactly_with_its_float32_masters(matrix: Matrix) -> None:
    for source in ("2ep2-bf16", "consolidated-bf16"):
        _assert_same(matrix.resumed[source, "2ep2-bf16"], matrix.narrow_straight, rtol=0, atol=0)
    wide = [key for key, state in matrix.narrow_straight.moments.items() if "master" not in state]
    assert wide == ["model.blocks.0.feed_forward.router.weight"]


def test_a_narrow_run_resumes_closely_at_another_number_of_ranks(matrix: Matrix) -> None:
    # bfloat16 gradients are rounded before they are summed over ranks: 3 steps of 1e-2 in a few directions.
    for pair in [("2ep2-bf16", "4ep2-bf16"), ("4ep2-bf16", "2ep2-bf16")]:
        got, expected = matrix.resumed[pair].weights, matrix.narrow_straight.weights
        torch.testing.assert_close(got, expected, rtol=0.1, atol=0.08)


def test_a_folder_read_without_ranks_holds_every_weight_and_moment(
    matrix: Matrix, folder: Path
) -> None:
    for name in ("2ep2", "4ep2", "4ep4", "consolidated"):
        checkpoint = read_whole(folder / f"{name}.ckpt")
        expected = matrix.halfway["2ep2" if name == "consolidated" else name]
        torch.testing.assert_close(checkpoint["state_dict"], expected.weights, rtol=0, atol=0)
        [optimizer] = checkpoint["optimizer_states"]
        names = [n for group in optimizer["param_groups"] for n in group["param_names"]]
        for number, parameter in enumerate(names):
            got = {k: v.flatten() if v.dim() else v for k, v in optimizer["state"][number].items()}
            torch.testing.assert_close(got, expected.moments[parameter], rtol=0, atol=0)


def test_a_module_is_built_from_a_folder_and_from_its_consolidated_file(
    matrix: Matrix, folder: Path
) -> None:
    for name in ("2ep2.ckpt", "consolidated.ckpt"):
        built = Module.load_from_checkpoint(folder / name)
        assert built.config == config()
        weights = {k: v.double() for k, v in built.state_dict().items() if v.is_floating_point()}
        for key, weight in weights.items():
            expected = matrix.halfway["2ep2"].weights[key].float().double()
            torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_weights_of_a_folder_go_into_a_module_of_ones_own(matrix: Matrix, folder: Path) -> None:
    module = make_module(seed=5).double()
    load_weights(module, folder / "4ep2.ckpt")
    torch.testing.assert_close(
        dict(module.state_dict()), matrix.halfway["4ep2"].weights, rtol=0, atol=0
    )


def test_a_folder_resumes_under_another_strategy_once_written_to_a_file(
    matrix: Matrix, folder: Path
) -> None:
    torch.save(read_whole(folder / "4ep4.ckpt"), folder / "whole.ckpt")
    plan = Plan(plain=True, steps=6, load=folder / "whole.ckpt", seed=7)
    [got] = run_ranks(run_plans, 1, [plan])[0]
    _assert_same(got, matrix.straight, rtol=1e-9, atol=1e-12)


def test_no_file_of_a_folder_needs_code_to_be_loaded(folder: Path, matrix: Matrix) -> None:
    meta = torch.load(folder / "4ep2.ckpt" / "meta.pt", weights_only=True)
    assert meta["global_step"] == 3
    assert sorted(p.name for p in folder.glob("*.partial")) == []


# ---- values by expert id --------------------------------------------------------------------------------------


def _number_experts(rank: int, world: int, ep: int, path: Path) -> None:
    """Expert e gets weights e+1 and 10(e+1), and moments e+0.5."""
    join_lightning(rank, world)
    trainer = rank_trainer(world, ExpertParallelStrategy(ep), max_steps=1)
    module = make_module().double()
    trainer.fit(module, loader(rank, world))
    experts = module.moe_layers[0].experts
    names = {p: n for n, p in trainer.strategy.layout.parameters.items()}
    names |= {t: n for n, t in (trainer.strategy.sharded.targets if world > 1 else {}).items()}
    replica, shard = rank // ep, rank % ep
    with torch.no_grad():
        for row, expert in enumerate(experts.expert_ids):
            experts.w_up_gate[row] = expert + 1
            experts.w_down[row] = 10 * (expert + 1)
        for parameter in trainer.optimizers[0].param_groups[0]["params"]:
            if ".experts." not in names[parameter]:
                continue
            moment = trainer.optimizers[0].state[parameter]["exp_avg"]
            per_rank = NUM_EXPERTS // ep
            whole = torch.arange(shard * per_rank, (shard + 1) * per_rank) + 0.5
            size = moment.numel() * (world // ep if world > ep else 1)
            values = whole.repeat_interleave(size // per_rank).double()
            moment.copy_(
                values.view(-1)[replica * moment.numel() :][: moment.numel()].view_as(moment)
            )
    trainer.save_checkpoint(path)


def _experts_of(state: State) -> dict[str, Tensor]:
    prefix = "model.blocks.0.feed_forward.experts"
    up, down = (state.weights[f"{prefix}.{name}"] for name in ("w_up_gate", "w_down"))
    moment = state.moments[f"{prefix}.w_up_gate"]["exp_avg"]
    return {"up": up, "down": down, "moment": moment.view(up.shape)}


def _load_only(rank: int, world: int, ep: int, path: Path) -> State:
    join_lightning(rank, world)
    trainer = rank_trainer(world, ExpertParallelStrategy(ep), max_steps=1)
    module = make_module(7).double()
    trainer.fit(module, loader(rank, world), ckpt_path=path)
    return whole_state(trainer, world, ep)


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_an_expert_keeps_its_weights_and_moments_by_id(tmp_path: Path, world: int, ep: int) -> None:
    run_ranks(_number_experts, world, ep, tmp_path / "x.ckpt")
    for other, other_ep in ((1, 1), (2, 2), (4, 4)):
        found = _experts_of(run_ranks(_load_only, other, other_ep, tmp_path / "x.ckpt")[0])
        for expert in range(NUM_EXPERTS):
            assert found["up"][expert].unique().tolist() == [expert + 1]
            assert found["down"][expert].unique().tolist() == [10 * (expert + 1)]
            assert found["moment"][expert].unique().tolist() == [expert + 0.5]
