"""Named ranges in Lightning's profiler, on two ranks."""

from pathlib import Path

from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerAction

from lightning_moe import ExpertParallelStrategy
from tests.kit.rank_trainers import join_lightning, loader, make_module, rank_trainer
from tests.kit.ranks import run_ranks

FORWARD = {"router", "dispatch", "experts", "combine", "attention", "head"}


def _profile(rank: int, world: int, folder: Path) -> set[str]:
    join_lightning(rank, world)
    profiler = PyTorchProfiler(
        dirpath=folder,
        filename="ranges",
        export_to_chrome=False,
        schedule=lambda _: ProfilerAction.RECORD,
    )
    trainer = rank_trainer(world, ExpertParallelStrategy(2, timeout=120.0), profiler=profiler)
    trainer.fit(make_module().double(), loader(rank, world))
    averages = profiler.function_events.key_averages()
    names = [event.key for event in averages if event.key.startswith("lightning_moe.")]
    return {name.removeprefix("lightning_moe.") for name in names}


def test_lightnings_profiler_names_the_parts_of_a_step(tmp_path: Path) -> None:
    for seen in run_ranks(_profile, 2, tmp_path):
        assert seen == FORWARD | {"reduce", "step", "gather"}
