"""However the ranks are started, two of them train like one."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe import ExpertParallelStrategy
from lightning_moe.registration import register_strategies
from tests.kit.rank_trainers import Plan, batches, make_module, rank_trainer, run_plans
from tests.kit.ranks import run_ranks
from tests.kit.script_runs import run_script


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """Weights of one process after 8 steps."""
    return run_ranks(run_plans, 1, [Plan(steps=8)])[0][0].weights


def _results(folder: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]


def _assert_trained(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    results = _results(folder)
    assert [(result["rank"], result["step"]) for result in results] == [(0, 8), (1, 8)]
    dense = [w for n, w in expected.items() if ".experts." not in n and "score_bias" not in n]
    experts = [w for name, w in expected.items() if ".experts." in name]
    for rank, result in enumerate(results):
        own = [*dense, *(w.chunk(2)[rank] for w in experts)]
        total = sum(w.double().abs().sum().item() for w in own)
        assert result["weights"] == pytest.approx(total, rel=1e-9)


def test_a_script_by_itself_starts_its_ranks(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    ended = run_script(tmp_path, "none", "strategy=expert_parallel")
    assert ended.code == 0, ended.said
    _assert_trained(tmp_path, expected)
    assert ended.running == []


def test_torchrun_starts_the_ranks(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    ended = run_script(tmp_path, "none", launcher=launcher)
    assert ended.code == 0, ended.said
    _assert_trained(tmp_path, expected)


def test_slurm_starts_the_ranks(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    tasks = []
    for rank in range(2):
        variables = {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "train",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NNODES": "1",
            "SLURM_NODELIST": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(root),
        }
        command = [sys.executable, "-m", "tests.e2e.rank_script", str(tmp_path), "none"]
        tasks.append(subprocess.Popen(command, cwd=root, env={**os.environ, **variables}))
    assert [task.wait(300) for task in tasks] == [0, 0]
    _assert_trained(tmp_path, expected)


SPAWN = """
import pickle, sys
from tests.kit.rank_trainers import make_module, rank_trainer
from tests.e2e.spawned import SpawnData
if __name__ == "__main__":
    module = make_module().double()
    trainer = rank_trainer(2, "expert_parallel_spawn", max_steps=8)
    trainer.fit(module, datamodule=SpawnData())
    pickle.dump(dict(module.state_dict()), open(sys.argv[1], "wb"))
"""


def test_spawned_ranks_give_all_experts_back(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWN)
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "weights")],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        timeout=300,
    )
    weights = pickle.loads((tmp_path / "weights").read_bytes())
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


SPAWN_THAT_FAILS = """
from tests.kit.rank_trainers import make_module, rank_trainer
from tests.e2e.spawned import FailingSpawnData
if __name__ == "__main__":
    rank_trainer(2, "expert_parallel_spawn", max_steps=8).fit(make_module().double(), datamodule=FailingSpawnData())
"""


def test_an_error_of_a_spawned_rank_is_what_the_main_process_reports(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWN_THAT_FAILS)
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 1
    assert "ValueError: rank 1 finds no data" in ended.stderr
    assert "not attached" not in ended.stderr


def test_names_are_known_to_the_trainer_and_can_be_registered_again() -> None:
    register_strategies()
    trainer = rank_trainer(1, "expert_parallel")
    assert isinstance(trainer.strategy, ExpertParallelStrategy)


def test_an_option_of_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="no option 'find_unused_parameters'; DDP's own options"):
        ExpertParallelStrategy(find_unused_parameters=True)


def _run_alone(_rank: int, _world: int) -> tuple[int, bool]:
    torch.distributed.destroy_process_group()
    trainer = rank_trainer(1, "expert_parallel", max_steps=2)
    trainer.fit(make_module().double(), DataLoader(batches(0, 1), batch_size=None))
    return trainer.global_step, "LOCAL_RANK" in os.environ


def test_one_device_needs_no_other_process_and_leaves_no_rank_behind() -> None:
    assert run_ranks(_run_alone, 1) == [(2, False)]
