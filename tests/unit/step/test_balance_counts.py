"""Which counts the balance loss of each scope takes, by hand."""

import pytest
import torch
from torch import Tensor

from lightning_moe import MoEConfig, RouterConfig, StepWindow
from lightning_moe.nn import MoE, Routing
from lightning_moe.nn.router_losses import router_losses
from lightning_moe.step.balance_counts import balance_counts
from tests.kit.operators import Calls
from tests.kit.records import routing_record


def _layers(*scopes: str) -> list[MoE]:
    routers = [RouterConfig(lb_loss_scope=scope, lb_loss_weight=1.0) for scope in scopes]
    return [MoE(4, MoEConfig(num_experts=2, hidden_size=3, router=router)) for router in routers]


class Ranks:
    """Two ranks of which the other has ten times this one's counts; remembers the messages."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.sizes.append(tensor.numel())
        return 11 * tensor


def _nothing_ahead() -> list[Tensor]:
    raise AssertionError("no scope but exact looks ahead")


def _counts(
    layers: list[MoE],
    records: list[Routing],
    window: StepWindow,
    ranks: Ranks,
    ahead: object = None,
) -> list[list[int]]:
    """The counts, after which the micro-batch is added."""
    found = balance_counts(
        layers,
        records,
        window,
        all_reduce_sum=ranks,
        counts_ahead=_nothing_ahead if ahead is None else ahead,
    )
    window.add(torch.tensor(0.0), records[0].num_tokens, records)
    return [counts.tolist() for counts in found]


def _close(window: StepWindow, ranks: Ranks) -> None:
    window.close(all_reduce_sum=ranks, num_ranks=2, accumulate=1, gradients=[])


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_local_scopes_take_the_record_and_send_nothing(scope: str) -> None:
    ranks = Ranks()
    assert _counts(_layers(scope), [routing_record([1, 2])], StepWindow(), ranks) == [[1, 2]]
    assert ranks.sizes == []


def test_global_micro_batch_takes_each_micro_batch_of_all_ranks() -> None:
    window, ranks, layers = StepWindow(), Ranks(), _layers("global_micro_batch")
    assert _counts(layers, [routing_record([1, 2])], window, ranks) == [[11, 22]]
    assert _counts(layers, [routing_record([0, 3])], window, ranks) == [[0, 33]]


def test_accumulated_takes_the_micro_batches_of_the_step_so_far_and_begins_anew() -> None:
    window, ranks, layers = StepWindow(), Ranks(), _layers("accumulated")
    assert _counts(layers, [routing_record([1, 2])], window, ranks) == [[11, 22]]
    assert _counts(layers, [routing_record([0, 3])], window, ranks) == [[11, 55]]
    assert _counts(layers, [routing_record([4, 0])], window, ranks) == [[55, 55]]
    _close(window, ranks)
    assert _counts(layers, [routing_record([2, 1])], window, ranks) == [[22, 11]]
    assert ranks.sizes == [2, 2, 2, 1 + 2, 2]


def test_lagged_takes_the_step_before_and_sends_nothing_but_in_the_first_step() -> None:
    window, ranks, layers = StepWindow(), Ranks(), _layers("lagged")
    assert _counts(layers, [routing_record([1, 2])], window, ranks) == [[11, 22]]
    assert _counts(layers, [routing_record([0, 3])], window, ranks) == [[0, 33]]
    _close(window, ranks)
    del ranks.sizes[:]
    for record in (routing_record([4, 0]), routing_record([0, 9])):
        assert _counts(layers, [record], window, ranks) == [[11, 55]]
    assert ranks.sizes == []
    _close(window, ranks)
    assert _counts(layers, [routing_record([1, 1])], window, ranks) == [[44, 99]]


def test_exact_takes_what_is_to_come_and_asks_for_it_once_per_step() -> None:
    window, ranks, layers = StepWindow(), Ranks(), _layers("exact", "exact")
    asked = []

    def ahead() -> list[Tensor]:
        asked.append(1)
        return [torch.tensor([0, 3]), torch.tensor([5, 1])]

    first, second = (
        [routing_record([1, 2]), routing_record([3, 0])],
        [routing_record([0, 3]), routing_record([5, 1])],
    )
    expected = [[11, 55], [88, 11]]
    assert _counts(layers, first, window, ranks, ahead) == expected
    assert _counts(layers, second, window, ranks, ahead) == expected
    assert asked == [1]
    assert ranks.sizes == [4]
    _close(window, ranks)
    last = [torch.zeros((), dtype=torch.int64)] * 2  # a step of one micro-batch
    assert _counts(layers, first, window, ranks, lambda: last) == [[11, 22], [33, 0]]


def test_layers_of_all_scopes_share_one_message() -> None:
    window, ranks = StepWindow(), Ranks()
    scopes = ("sequence", "micro_batch", "global_micro_batch", "accumulated", "lagged", "exact")
    records = [routing_record([1, 2]) for _ in scopes]
    ahead = [torch.tensor([6, 0])] * 6
    found = _counts(_layers(*scopes), records, window, ranks, lambda: ahead)
    assert found == [[1, 2], [1, 2], [11, 22], [11, 22], [11, 22], [77, 22]]
    assert ranks.sizes == [8]
    found = _counts(_layers(*scopes), [routing_record([6, 0])] * 6, window, ranks, _nothing_ahead)
    assert found == [[6, 0], [6, 0], [66, 0], [77, 22], [66, 0], [77, 22]]
    assert ranks.sizes == [8, 6]


def test_a_step_that_routed_otherwise_than_foreseen_is_refused() -> None:
    window, ranks = StepWindow(), Ranks()
    _counts(
        _layers("exact"), [routing_record([50, 50])], window, ranks, lambda: [torch.tensor([0, 0])]
    )
    _counts(_layers("exact"), [routing_record([1, 0])], window, ranks)
    _close(window, ranks)  # one near tie of a hundred
    _counts(
        _layers("exact"), [routing_record([50, 50])], window, ranks, lambda: [torch.tensor([4, 2])]
    )
    _counts(_layers("exact"), [routing_record([2, 4])], window, ranks)
    message = r"MoE layer 0 was to route \[594, 572\] .* routed \[572, 594\]; routing_step must"
    with pytest.raises(RuntimeError, match=message):
        _close(window, ranks)


def test_the_check_of_many_layers_waits_for_the_device_once() -> None:
    window, ranks, records = StepWindow(), Ranks(), [routing_record([3, 1]) for _ in range(5)]
    _counts(_layers(*["exact"] * 5), records, window, ranks, lambda: [torch.tensor([0, 0])] * 5)
    with Calls("aten._local_scalar_dense") as waits:
        _close(window, ranks)
    assert waits.count <= 1


def test_the_state_of_a_window_is_the_step_before() -> None:
    window, ranks, layers = StepWindow(), Ranks(), _layers("lagged", "lagged")
    assert StepWindow().state_dict() == {"previous": None}
    window.add(torch.tensor(0.0), torch.tensor(3), [routing_record([1, 2]), routing_record([3, 0])])
    _close(window, ranks)
    resumed = StepWindow()
    resumed.load_state_dict(window.state_dict())
    resumed.reset(resumes=True)
    records = [routing_record([7, 7])] * 2
    assert _counts(layers, records, resumed, ranks) == [[11, 22], [33, 0]]
    resumed.reset()
    assert _counts(layers, records, resumed, ranks) == [[77, 77]] * 2


def test_a_step_before_with_other_layers_is_refused() -> None:
    window = StepWindow()
    window.load_state_dict({"previous": [[1, 2, 3]]})
    with pytest.raises(ValueError, match=r"shapes \[\(3,\)\], and MoE layer 0 has \(2,\)"):
        _counts(_layers("lagged"), [routing_record([1, 2])], window, Ranks())
    window.load_state_dict({"previous": [[1, 2]]})
    with pytest.raises(ValueError, match=r"MoE layer 1 has \(2,\)"):
        _counts(_layers("lagged", "lagged"), [routing_record([1, 2])] * 2, window, Ranks())


@pytest.mark.parametrize("scope", ["global_micro_batch", "accumulated", "lagged", "exact"])
def test_a_single_call_cannot_know_the_counts_of_wider_scopes(scope: str) -> None:
    message = f"lb_loss_scope='{scope}' takes counts from more tokens.*step_router_losses"
    with pytest.raises(ValueError, match=message):
        router_losses(_layers(scope), [routing_record([1, 2])])
