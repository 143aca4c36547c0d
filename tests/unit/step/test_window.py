"""The sums of one optimizer step, and the one division."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_moe import StepWindow
from tests.kit.records import routing_record


def _close(
    window: StepWindow,
    gradients: list[Tensor],
    *,
    num_ranks: int = 1,
    accumulate: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> object:
    return window.close(
        all_reduce_sum=reduce, num_ranks=num_ranks, accumulate=accumulate, gradients=gradients
    )


def test_losses_are_divided_by_the_nominal_tokens_only() -> None:
    loss = StepWindow(4).add(torch.tensor(6.0), torch.tensor(3))
    assert loss.item() == 1.5


def test_gradients_become_the_mean_over_all_tokens_of_the_step() -> None:
    window = StepWindow(4)
    for num_tokens in (3, 5):
        window.add(torch.tensor(1.0), torch.tensor(num_tokens))
    gradient = torch.tensor([2.0])
    # The other rank saw twice as many.
    _close(window, [gradient], num_ranks=2, accumulate=2, reduce=lambda tensor: 3 * tensor)
    assert gradient.item() == pytest.approx(2.0 * (2 * 2 * 4) / 24)


def test_a_second_close_of_the_same_step_changes_nothing() -> None:
    window = StepWindow(4)
    window.add(torch.tensor(1.0), torch.tensor(2))
    gradient = torch.tensor([1.0])
    first = _close(window, [gradient])
    second = _close(window, [gradient])
    assert first is second is window.last
    assert gradient.item() == 2.0


def test_a_window_that_was_never_fed_gives_nothing() -> None:
    gradient = torch.tensor([1.0])
    assert _close(StepWindow(), [gradient]) is None
    assert gradient.item() == 1.0


def test_a_step_without_tokens_leaves_finite_gradients() -> None:
    window = StepWindow(4)
    window.add(torch.tensor(0.0), torch.tensor(0), [], {"ce": torch.tensor(0.0)})
    gradient = torch.tensor([0.0])
    statistics = _close(window, [gradient])
    assert gradient.item() == 0.0
    assert statistics.means()["ce"].item() == 0.0


def test_gradients_of_every_type_are_divided() -> None:
    window = StepWindow(1)
    window.add(torch.tensor(1.0), torch.tensor(4))
    gradients = [
        torch.ones(3, dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.float64)
    ]
    _close(window, gradients)
    assert all((gradient == 0.25).all() for gradient in gradients)


def test_statistics_add_up_over_micro_batches_and_ranks() -> None:
    window = StepWindow(1)
    for counts in ((1, 2), (3, 0)):
        sums = {"ce": torch.tensor(2.0), "z": torch.tensor(0.5)}
        tokens = torch.tensor(sum(counts))
        window.add(
            torch.tensor(1.0), tokens, [routing_record(counts), routing_record([7, 1, 1])], sums
        )
    statistics = _close(window, [], reduce=lambda tensor: 2 * tensor)
    assert statistics.num_tokens.item() == 12
    assert [counts.tolist() for counts in statistics.requested] == [[8, 4], [28, 4, 4]]
    assert statistics.means()["ce"].item() == pytest.approx(8 / 12)
    assert statistics.means()["z"].item() == pytest.approx(2 / 12)


def test_counts_beyond_single_precision_stay_exact() -> None:
    window = StepWindow()
    window.record([routing_record([2**24 + 1, 1])])
    assert _close(window, []).requested[0].tolist() == [2**24 + 1, 1]


def test_recording_alone_leaves_gradients_as_they_are() -> None:
    window = StepWindow(4)
    window.record([routing_record([1, 2])])
    gradient = torch.tensor([1.0])
    assert _close(window, [gradient]).num_tokens.item() == 3
    assert gradient.item() == 1.0


def test_steps_do_not_leak_into_each_other() -> None:
    window = StepWindow()
    for counts in ((5, 0), (1, 2)):
        window.add(
            torch.tensor(1.0), torch.tensor(3), [routing_record(counts)], {"a": torch.tensor(1.0)}
        )
        statistics = _close(window, [])
    assert statistics.requested[0].tolist() == [1, 2]
    assert statistics.num_tokens.item() == 3
    assert statistics.sums["a"].item() == 1.0


def test_no_graph_is_kept_alive() -> None:
    window = StepWindow()
    leaf = torch.tensor(2.0, requires_grad=True)
    window.add(leaf * 2, torch.tensor(1), [], {"a": leaf * 3})
    assert not _close(window, []).sums["a"].requires_grad


def test_a_reset_forgets_the_open_step() -> None:
    window = StepWindow()
    window.add(torch.tensor(1.0), torch.tensor(3), [routing_record([1, 2])])
    window.reset()
    assert not window.is_open
    assert _close(window, []) is None


def test_another_number_of_records_within_a_step_is_refused() -> None:
    window = StepWindow()
    window.record([routing_record([1, 2])])
    with pytest.raises(ValueError, match="2 routing records after 1 in the same optimizer step"):
        window.record([routing_record([1, 2]), routing_record([1, 2])])


def test_the_same_records_are_not_counted_twice() -> None:
    window, records = StepWindow(), [routing_record([1, 2])]
    window.record(records)
    with pytest.raises(ValueError, match="records came to the window twice in a row"):
        window.add(torch.tensor(1.0), torch.tensor(3), records)
    _close(window, [])
    window.record(records)


def test_nominal_tokens_must_be_positive() -> None:
    with pytest.raises(ValueError, match="nominal_tokens=0 must be at least 1"):
        StepWindow(0)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda window: pickle.loads(pickle.dumps(window))]
)
def test_an_open_window_can_be_copied(clone: Callable[[StepWindow], StepWindow]) -> None:
    window = StepWindow(2)
    leaf = torch.tensor(2.0, requires_grad=True)
    window.add(leaf * 2, torch.tensor(3), [routing_record([1, 2])], {"a": leaf * 3})
    statistics = _close(clone(window), [])
    assert statistics.num_tokens.item() == 3
    assert window.is_open


def _added(window: StepWindow, weight: Tensor) -> torch.optim.Optimizer:
    """Its optimizer, after a backward through a part of it that is two operations away."""
    window.add((weight[:1] * 2).sum(), torch.tensor(3)).backward()
    return torch.optim.SGD([weight], lr=0.1)


def test_an_optimizer_that_steps_before_the_window_is_closed_is_refused() -> None:
    window, weight = StepWindow(), torch.ones(2, requires_grad=True)
    optimizer = _added(window, weight)
    with pytest.raises(RuntimeError, match="nothing has closed the module's StepWindow"):
        optimizer.step()
    _close(window, [weight.grad])
    optimizer.step()
    _added(window, weight)
    with pytest.raises(RuntimeError, match="nothing has closed the module's StepWindow"):
        optimizer.step()
    # Nobody is going to close it any more.
    del window
    optimizer.step()


def test_an_optimizer_of_other_weights_may_step_while_a_window_is_open() -> None:
    window, other = StepWindow(), torch.ones(2, requires_grad=True)
    _added(window, torch.ones(2, requires_grad=True))
    other.sum().backward()
    torch.optim.SGD([other], lr=0.1).step()
    assert window.divides


def test_a_window_that_is_collected_in_the_middle_of_a_step_leaves_the_hooks_alone() -> None:
    # torch asks hooks in the order in which they came: the window's own follows the one that drops it.
    windows, weight = [StepWindow()], torch.nn.Parameter(torch.ones(3))
    handle = register_optimizer_step_post_hook(lambda *_: windows.clear())
    windows[0].add(weight.sum(), torch.tensor(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    handle.remove()
    assert windows == []
