"""What a training step sends, pinned: calls by kind and axis, and bytes where a formula gives them."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.kit.rank_runs import OPTIMIZERS, Recorded, batches, config, fit, parallel
from tests.kit.ranks import run_ranks


class Counted(Recorded):
    """The ledger of every batch but the first, which settles sizes."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.mesh.ledger.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        ledger = self.trainer.strategy.mesh.ledger
        self.ledgers = [*getattr(self, "ledgers", []), (dict(ledger.calls), dict(ledger.bytes))]


def _ledgers(
    rank: int, world: int, ep: int, accumulate: int, router: dict[str, Any], options: dict[str, Any]
) -> list[tuple[dict[Any, int], dict[Any, int]]]:
    torch.manual_seed(0)
    module = Counted(config(**router), OPTIMIZERS["adamw"])
    fit(
        rank,
        world,
        module,
        batches(rank, world, steps=3, accumulate=accumulate, sequences=4 * accumulate),
        strategy=parallel(ep, **options),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        precision="32-true",
    )
    return [(Counter(calls), sent) for calls, sent in module.ledgers[accumulate:]]


# Of one optimizer step: reduced gradients; the tokens, counts and sums of the step; the norm, for the guard and
# for clipping; whether any rank was told to stop.
OTHER = 1 + 2 + 1


@pytest.mark.parametrize(
    ("ep", "distributed", "expected"),
    [
        # One message per kind of bucket, and one per gathered kind. Two layers: counts, there and back; backward.
        (
            1,
            True,
            {
                ("reduce_scatter", "stage"): 1,
                ("reduce_scatter", "ep_dp"): 1,
                ("all_reduce", "stage"): 1,
                ("all_reduce", "world"): OTHER,
                ("all_gather", "stage"): 1,
                ("all_gather", "ep_dp"): 1,
            },
        ),
        (
            1,
            False,
            {
                ("all_reduce", "stage"): 1,
                ("all_reduce", "world"): OTHER,
                ("all_reduce", "ep_dp"): 1,
            },
        ),
        (
            2,
            True,
            {
                ("reduce_scatter", "stage"): 1,
                ("all_reduce", "stage"): 1,
                ("all_reduce", "world"): OTHER,
                ("all_gather", "stage"): 1,
                ("all_gather", "ep"): 2,
                ("all_to_all", "ep"): 2 * 4,
            },
        ),
        (
            2,
            False,
            {
                ("all_reduce", "stage"): 1,
                ("all_reduce", "world"): OTHER,
                ("all_gather", "ep"): 2,
                ("all_to_all", "ep"): 2 * 4,
            },
        ),
    ],
)
def test_collectives_of_one_step(
    ep: int, distributed: bool, expected: dict[tuple[str, str], int]
) -> None:
    for steps in run_ranks(
        _ledgers, 2, ep, 1, {}, {"distributed_optimizer": distributed}, timeout_s=120
    ):
        for calls, _ in steps:
            assert calls == expected


# Messages of counts in the first and the second micro-batch of a step, both layers in one; forwards ahead of the first.
SCOPES = {
    "sequence": (0, 0, 0),
    "micro_batch": (0, 0, 0),
    "global_micro_batch": (1, 1, 0),
    "accumulated": (1, 1, 0),
    "lagged": (0, 0, 0),
    "exact": (1, 0, 1),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_messages_of_each_balance_scope(scope: str) -> None:
    in_first, in_last, ahead = SCOPES[scope]
    for steps in run_ranks(_ledgers, 2, 2, 2, {"lb_loss_scope": scope}, {}, timeout_s=120):
        first, last = steps[0][0], steps[1][0]
        # The counter leaves out what is 0.
        assert +first == +Counter(
            {
                ("all_reduce", "world"): in_first,
                ("all_gather", "ep"): 2 * (1 + ahead),
                ("all_to_all", "ep"): 8 + 4 * ahead,
            }
        )
        assert last == {
            ("reduce_scatter", "stage"): 1,
            ("all_reduce", "stage"): 1,
            ("all_reduce", "world"): in_last + OTHER,
            ("all_gather", "stage"): 1,
            ("all_gather", "ep"): 2,
            ("all_to_all", "ep"): 8,
        }


def test_counts_of_all_layers_are_one_message_of_integers() -> None:
    sizes = []
    for scope in ("lagged", "accumulated"):
        steps = run_ranks(_ledgers, 2, 1, 2, {"lb_loss_scope": scope}, {}, timeout_s=120)[0]
        sizes.append(steps[0][1].get(("all_reduce", "world"), 0))
    assert sizes == [0, 2 * 4 * 8]  # layers, experts, bytes


def test_the_static_dispatcher_sends_no_counts() -> None:
    options = {"dispatcher": "static", "capacity_factor": 1.25}
    for steps in run_ranks(_ledgers, 2, 2, 1, {}, options, timeout_s=120):
        calls, sent = steps[0]
        assert ("all_gather", "ep") not in calls
        # One message per step, whether any rank had a larger batch than there is room for.
        assert calls["all_reduce", "world"] == OTHER + 1
        # 14 tokens of a rank, 2 choices of 4 experts, 1.25: 16 slots of 16 floats for 4 experts, 8 times.
        assert sent["all_to_all", "ep"] == 8 * 4 * 16 * 16 * 4


def test_bytes_of_gradients_and_weights_follow_from_the_number_of_parameters() -> None:
    """Embedding, head and the experts' matrices are split; everything else is reduced whole."""
    model = config()
    embedding, head = 256 * 16, 256 * 16
    for steps in run_ranks(_ledgers, 2, 2, 1, {}, {}, timeout_s=120):
        _, sent = steps[0]
        flags = 2 * 2  # one per parameter, for both ranks
        assert sent["reduce_scatter", "stage"] == 4 * (embedding + head + flags)
        assert sent["all_gather", "stage"] == 4 * (embedding + head) // 2
    assert model.num_layers == 2
