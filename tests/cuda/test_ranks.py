"""Whole Trainer runs on two ranks with CUDA tensors, whose numbers equal the CPU's, and the waits of a rank."""

import pytest

from tests.cuda.table import row
from tests.cuda.test_training import FLOAT32, strategy
from tests.cuda.trained import COMPARED, Case, Trained, moe, router, train
from tests.kit.rank_trainers import join_lightning
from tests.kit.ranks import run_ranks

CASES = {
    "ep=2, all_to_all": Case(trainer=FLOAT32 | strategy(expert_parallel=2)),
    "ep=2, static": Case(trainer=FLOAT32 | strategy(expert_parallel=2, dispatcher="static")),
    "dp=2": Case(trainer=FLOAT32 | strategy(expert_parallel=1)),
    "ep=2, exact": Case(
        moe(router=router(lb_loss_scope="exact")), trainer=FLOAT32 | strategy(expert_parallel=2)
    ),
    "bf16-mixed, ep=2": Case(trainer=strategy(expert_parallel=2)),
    "bf16-mixed, ep=2, static": Case(trainer=strategy(expert_parallel=2, dispatcher="static")),
}


def _train(rank: int, world: int, name: str, accelerator: str) -> Trained:
    join_lightning(rank, world)
    return train(CASES[name], accelerator, rank=rank, world=world)


@pytest.mark.parametrize("name", CASES)
def test_training_on_two_cuda_ranks_gives_the_numbers_of_two_on_the_cpu(name: str) -> None:
    expected, _ = run_ranks(_train, 2, name, "cpu", timeout_s=300.0)
    found, other = run_ranks(_train, 2, name, "gpu", timeout_s=300.0)
    numbers = {key: (found.metrics[key], expected.metrics[key]) for key in COMPARED}
    row(f"two ranks, {name}", numbers, f"waits {found.by_batch}")
    relative = 1e-2 if name.startswith("bf16") else 1e-5
    for key, (ours, cpu) in numbers.items():
        assert ours == other.metrics[key] == pytest.approx(cpu, rel=relative), key
