"""The waits of the host in one optimizer step, all of them, by place. A new one fails here."""

import pytest

from lightning_moe.callbacks import ExpertLoadMonitor
from tests.cuda.table import row
from tests.cuda.test_training import FLOAT32, strategy
from tests.cuda.trained import Case, Trained, moe, router, train
from tests.kit.rank_trainers import join_lightning
from tests.kit.ranks import run_ranks

# Whether a step is skipped must be known before the optimizer runs.
GUARD = {"callbacks/gradient_guard.py:on_before_optimizer_step": 1}
STATISTICS = {"ops/read_back.py:values": 1}
# The monitor comes before the guard where a user gives it to the Trainer, and then waits for the counts.
MONITORED = GUARD | STATISTICS
LOOP = {"ops/grouped_mm.py:loop_grouped_mm": 8}
GROUPED = {"ops/grouped_mm.py:_grouped_mm": 24}

ALONE: dict[str, tuple[Case, dict[str, int]]] = {
    "any strategy": (Case(), GUARD),
    "ExpertParallelStrategy": (Case(trainer=strategy()), GUARD),
    "static": (Case(trainer=strategy(dispatcher="static")), GUARD),
    "a progress bar": (Case(trainer={"enable_progress_bar": True}), GUARD),
    "a monitor of the Trainer": (
        Case(trainer={"callbacks": lambda: [ExpertLoadMonitor(write_files=False)]}),
        MONITORED,
    ),
    "offload and recomputation": (
        Case({"recompute": "moe", "offload_activations": True}),
        GUARD,
    ),
    "lagged": (Case(moe(router=router(lb_loss_scope="lagged"))), GUARD),
    "exact": (
        Case(moe(router=router(lb_loss_scope="exact"))),
        GUARD | {"step/scope_state.py:end_step": 1},
    ),
    "bias": (Case(moe(router=router(bias_gamma=1e-3, bias_centering=True))), GUARD),
    "steps of tokens": (Case(optim={"unit": "tokens", "warmup": 100}), GUARD),
    # Two layers, two micro-batches.
    "loop": (Case(moe(backend="loop")), GUARD | LOOP),
    "float32": (Case(trainer=FLOAT32), GUARD | GROUPED),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_waits_at_most_twice_per_step_and_never_per_micro_batch(name: str) -> None:
    case, expected = ALONE[name]
    found = train(case, "gpu")
    row(f"waits, {name}", {}, f"{found.by_batch} {found.waits}")
    assert found.waits == expected


def test_a_log_entry_adds_one_wait() -> None:
    quiet = train(Case(), "gpu")
    entry = train(Case(trainer={"log_every_n_steps": 1}), "gpu")
    added = {name: n for name, n in entry.waits.items() if n != quiet.waits.get(name)}
    row("waits, with a log entry", {}, f"{entry.by_batch} {added}")
    assert added == {"metrics/routing_sums.py:unpack": 1}


# Lightning, which our launcher runs, asks twice per micro-batch whether rank 0 got SIGTERM. gloo, which stands for NCCL
# here, waits in each of its messages, in threads of its own as well.
OF_OTHERS = ("strategy/launchers.py:launch", ":cudaStreamSynchronize", "parallel/collectives.py")
RANKS: dict[str, tuple[Case, dict[str, int]]] = {
    # One per layer and micro-batch.
    "ep=2, all_to_all": (
        Case(trainer=strategy(expert_parallel=2)),
        GUARD | {"transports/all_to_all.py:dispatch": 4},
    ),
    "ep=2, static": (
        Case(trainer=strategy(expert_parallel=2, dispatcher="static")),
        GUARD | {"transports/transport.py:refuse": 1},
    ),
    "dp=2": (Case(trainer=strategy(expert_parallel=1)), GUARD),
}


def _train(rank: int, world: int, name: str) -> Trained:
    join_lightning(rank, world)
    return train(RANKS[name][0], "gpu", rank=rank, world=world)


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_of_two_waits_as_one_alone_and_for_all_to_all(name: str) -> None:
    for found in run_ranks(_train, 2, name, timeout_s=300.0):
        own = {
            place: number
            for place, number in found.waits.items()
            if not place.startswith(OF_OTHERS)
        }
        row(f"waits of two ranks, {name}", {}, f"{found.by_batch} {found.waits}")
        assert own == RANKS[name][1]
