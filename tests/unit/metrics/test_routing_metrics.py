"""Metrics of routing records: by hand, over batches, after reset and merge, and over ranks."""

import doctest
import inspect
import math
import pickle

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_moe.config import MoEConfig, RouterConfig
from lightning_moe.metrics import (
    BatchMaxVio,
    ExpertLoad,
    RouterBalance,
    RouterConfidence,
    expert_load,
    router,
    token_mean,
)
from lightning_moe.metrics.layer_sums import LayerSums
from lightning_moe.nn import MoE
from lightning_moe.ops import Routing, balance_loss
from tests.kit.randomized import randomized
from tests.kit.ranks import run_ranks
from tests.kit.records import routing_record, token_routes

# Two layers of unlike size.
SIZES = (4, 3)
CLASSES = [ExpertLoad, BatchMaxVio, RouterBalance, RouterConfidence]


def _batches(num_batches: int = 4) -> list[list[Routing]]:
    """Records of two real layers, some tokens invalid."""
    generator = torch.Generator().manual_seed(2)
    layers = []
    for size in SIZES:
        config = MoEConfig(num_experts=size, hidden_size=4, router=RouterConfig(top_k=2))
        layers.append(randomized(MoE(5, config), generator).double())
        layers[-1].router.trace = True
    batches = []
    with torch.no_grad():
        for _ in range(num_batches):
            x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
            valid = torch.rand(7, generator=generator) < 0.8
            batches.append([layer(x, valid)[1] for layer in layers])
    return batches


def _values(metric: Metric) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in metric.compute().items()}


def _assert_close(ours: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert ours[name] == pytest.approx(values, rel=1e-12, abs=1e-15, nan_ok=True), name


def test_load_of_summed_counts_by_hand() -> None:
    metric = ExpertLoad((4, 2), num_ranks=2)
    metric.update([routing_record([4, 0, 0, 0]), routing_record([1, 3])])
    metric.update([routing_record([0, 0, 8, 0]), routing_record([3, 1])])
    values = _values(metric)
    # Sums 4 0 8 0 and 4 4: not the mean of 4 and 4, nor of 1.5 and 1.5.
    assert values["max_over_mean"] == pytest.approx([8 / 3, 1.0])
    assert values["max_violation"] == pytest.approx([5 / 3, 0.0])
    entropy = math.log(3) - 2 / 3 * math.log(2)
    assert values["entropy"] == pytest.approx([entropy, math.log(2)])
    assert values["entropy_imbalance"] == pytest.approx([1 - entropy / math.log(4), 0.0])
    assert values["variation"] == pytest.approx([math.sqrt(11) / 3, 0.0])
    assert values["dead_share"] == [0.5, 0.0]
    assert values["rank_max_over_mean"] == pytest.approx([4 / 3, 1.0])
    assert (values["drop_rate"], values["lost_token_share"]) == ([0.0, 0.0], [0.0, 0.0])


def test_drops_are_told_from_requests() -> None:
    metric = ExpertLoad(4, num_ranks=2)
    metric.update(routing_record([8, 0, 4, 4], kept=[4, 0, 4, 4], lost=1, top_k=2))
    metric.update(routing_record([0, 4, 0, 0], top_k=2))
    values = _values(metric)
    assert values["max_over_mean"] == 8 / 5
    assert values["kept_max_over_mean"] == 1.0
    assert values["drop_rate"] == 4 / 20
    assert values["lost_token_share"] == 1 / 10
    assert values["rank_max_over_mean"] == 12 / 10
    assert values["kept_rank_max_over_mean"] == 1.0


def test_batches_may_be_uneven_while_their_sum_is_even() -> None:
    load, batches = ExpertLoad(4), BatchMaxVio(4)
    for expert in range(4):
        counts = [0] * 4
        counts[expert] = 6
        assert load(routing_record(counts))["max_over_mean"].item() == 4.0
        batches.update(routing_record(counts))
    assert load.compute()["max_over_mean"].item() == 1.0
    assert _values(batches) == {"mean": 3.0, "max": 3.0}


def test_a_batch_without_tokens_is_no_batch() -> None:
    metric = BatchMaxVio(2)
    metric.update(routing_record([0, 0]))
    assert math.isnan(_values(metric)["mean"])
    metric.update(routing_record([3, 1]))
    assert _values(metric) == {"mean": 0.5, "max": 0.5}


def test_the_balance_loss_is_that_of_all_tokens_as_one_batch() -> None:
    metric = RouterBalance(SIZES)
    batches = _batches()
    for records in batches:
        metric.update(records)
    losses = []
    for of_layer in zip(*batches, strict=True):
        whole = Routing(
            requested_E=sum(record.requested_E for record in of_layer),
            kept_E=sum(record.kept_E for record in of_layer),
            score_sums_E=sum(record.score_sums_E for record in of_layer),
            logz_squared=torch.tensor(0.0),
            num_tokens=sum(record.num_tokens for record in of_layer),
        )
        with torch.no_grad():
            losses.append(balance_loss([whole]).item())
    values = _values(metric)
    assert values["balance_loss"] == pytest.approx(losses, abs=1e-12)
    assert values["inner_product"] == pytest.approx([loss - 1 for loss in losses], abs=1e-12)


def _traced(margins: list[float], entropies: list[float], valid: list[bool]) -> Routing:
    routes = token_routes(margins, entropies, valid)
    return routing_record([sum(valid), 0], tokens=routes)


def test_confidence_is_a_mean_over_valid_tokens_and_finite_margins() -> None:
    metric = RouterConfidence(2)
    metric.update(_traced([0.5, math.inf, 9.0], [1.0, 0.0, 7.0], [True, True, False]))
    metric.update(_traced([0.25], [0.5], [True]))
    assert _values(metric) == {"margin": 0.375, "entropy": 0.5}


def test_confidence_needs_a_router_that_traces() -> None:
    with pytest.raises(ValueError, match=r"set `moe.router.trace = True` on every MoE layer"):
        RouterConfidence(2).update(routing_record([1, 1]))


@pytest.mark.parametrize("kind", CLASSES)
def test_records_of_other_layers_are_refused(kind: type[Metric]) -> None:
    records = _batches(1)[0]
    with pytest.raises(ValueError, match=r"num_experts=\[3, 4\]\) got .* layers with \[4, 3\]"):
        kind((3, 4)).update(records)
    with pytest.raises(ValueError, match=r"got records of layers with \[4, 3\] experts"):
        kind(4).update(records)


@pytest.mark.parametrize("num_experts", [0, (), (4, 0), "4", (4, 4.5), True, 4.0])
def test_a_layer_without_experts_is_refused(num_experts: object) -> None:
    with pytest.raises(ValueError, match=r"num_experts=.* must be a whole number of experts"):
        # The shape checker of the tests would refuse other types by itself.
        inspect.unwrap(LayerSums.__init__)(object.__new__(ExpertLoad), num_experts)


def test_experts_must_divide_over_ranks() -> None:
    with pytest.raises(ValueError, match="3 experts don't spread evenly over 2 ranks"):
        ExpertLoad((4, 3), num_ranks=2)


@pytest.mark.parametrize("kind", CLASSES)
def test_forward_gives_the_batch_and_compute_the_whole(kind: type[Metric]) -> None:
    batches = _batches()
    running, whole = kind(SIZES), kind(SIZES)
    for records in batches:
        alone = kind(SIZES)
        alone.update(records)
        whole.update(records)
        got = {name: value.tolist() for name, value in running(records).items()}
        _assert_close(got, _values(alone))
    _assert_close(_values(running), _values(whole))
    running.reset()
    running.update(batches[1])
    alone = kind(SIZES)
    alone.update(batches[1])
    _assert_close(_values(running), _values(alone))


@pytest.mark.parametrize("kind", CLASSES)
def test_merged_metrics_equal_one_that_saw_everything(kind: type[Metric]) -> None:
    batches = _batches()
    whole, first, second = kind(SIZES), kind(SIZES), kind(SIZES)
    for number, records in enumerate(batches):
        whole.update(records)
        (first if number < 3 else second).update(records)
    first.merge_state(pickle.loads(pickle.dumps(second)))
    _assert_close(_values(first), _values(whole))


@pytest.mark.parametrize("kind", CLASSES)
def test_no_graph_is_kept_and_nothing_is_stored_in_a_state_dict(kind: type[Metric]) -> None:
    layer = MoE(5, MoEConfig(num_experts=3, router=RouterConfig(lb_loss_weight=0.1)))
    layer.router.trace = True
    metric = kind(3)
    metric.update(layer(torch.randn(4, 5))[1])
    states = [getattr(metric, name) for name in metric._defaults]
    assert all(isinstance(state, Tensor) and not state.requires_grad for state in states)
    assert metric.state_dict() == {}


def test_metrics_of_what_was_never_seen_say_so() -> None:
    for kind, nan in ((RouterBalance, "balance_loss"), (RouterConfidence, "entropy")):
        metric = kind(2)
        metric.update(_traced([0.5], [1.0], [False]))
        assert math.isnan(_values(metric)[nan])


def _values_on_rank(rank: int, world: int, kind: type[Metric], alone: bool) -> dict[str, object]:
    group = None
    if alone:
        groups = [torch.distributed.new_group([each]) for each in range(world)]
        group = groups[rank]
    metric = kind(SIZES, process_group=group)
    # Three batches on one rank, one on the other.
    for records in [_batches()[:3], _batches()[3:]][rank]:
        metric.update(records)
    return _values(metric)


@pytest.mark.parametrize("kind", CLASSES)
def test_two_ranks_give_what_one_process_gives(kind: type[Metric]) -> None:
    whole = kind(SIZES)
    for records in _batches():
        whole.update(records)
    for values in run_ranks(_values_on_rank, 2, kind, False):
        _assert_close(values, _values(whole))


def test_a_process_group_limits_the_ranks_that_count() -> None:
    for values, batches in zip(
        run_ranks(_values_on_rank, 2, ExpertLoad, True),
        (_batches()[:3], _batches()[3:]),
        strict=True,
    ):
        own = ExpertLoad(SIZES)
        for records in batches:
            own.update(records)
        _assert_close(values, _values(own))


@pytest.mark.parametrize("module", [expert_load, router, token_mean])
def test_the_examples_of_the_documentation_are_true(module: object) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0


def test_what_is_no_record_or_no_number_of_ranks_is_refused() -> None:
    for records in (torch.ones(4), [torch.ones(4)]):
        with pytest.raises(ValueError, match=r"ExpertLoad got a .* that holds no routing records"):
            inspect.unwrap(LayerSums._checked)(ExpertLoad(4), records)
    with pytest.raises(ValueError, match=r"num_ranks=2\.0 must be a whole number"):
        inspect.unwrap(ExpertLoad.__init__)(object.__new__(ExpertLoad), 4, num_ranks=2.0)


def test_scores_that_are_not_finite_do_not_pass_for_even_ones() -> None:
    metric = RouterBalance(2)
    for scores in ([1.0, 2.0], [math.nan, 1.0]):
        metric.update(routing_record([1, 2], scores=scores))
    assert metric.compute()["balance_loss"].isnan()
