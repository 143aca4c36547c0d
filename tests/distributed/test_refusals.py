"""What can't work is refused at once: before ranks are connected, and before a weight is changed."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe import ExpertParallelStrategy, StaticDispatch
from tests.kit.modules import Regression
from tests.kit.rank_runs import Recorded, batches, config, fit, parallel
from tests.kit.rank_trainers import rank_trainer, torchrun_variables
from tests.kit.ranks import run_ranks


@pytest.mark.parametrize(
    ("num_experts", "world", "expert_parallel", "message"),
    [
        (6, 4, 4, "model.moe.num_experts=6 is not a multiple of strategy.expert_parallel=4"),
        (4, 4, 3, "model.moe.num_experts=4 is not a multiple of strategy.expert_parallel=3"),
        (8, 4, 8, "strategy.expert_parallel=8 does not divide the 4 ranks"),
        (2, 4, 4, "model.moe.num_experts=2 is not a multiple of strategy.expert_parallel=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_ranks_connect(
    monkeypatch: pytest.MonkeyPatch,
    num_experts: int,
    world: int,
    expert_parallel: int,
    message: str,
) -> None:
    module = Recorded(config(num_experts=num_experts), torch.optim.AdamW)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, value in torchrun_variables(0, world).items():
        monkeypatch.setenv(name, value)
    trainer = rank_trainer(world, ExpertParallelStrategy(expert_parallel))
    data = batches(0, 1, steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data, data)
    assert not dist.is_initialized()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("num_experts", "expert_parallel", "message"),
    [
        (4, 1, "has no effect with strategy.expert_parallel=1: each rank"),
        (3, "auto", "has no effect with strategy.expert_parallel=auto, which is 1 here: each rank"),
    ],
)
def test_a_limit_on_rows_is_refused_where_none_travel(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, expert_parallel: Any, message: str
) -> None:
    module = Recorded(config(num_experts=num_experts), torch.optim.AdamW)
    for name, value in torchrun_variables(0, 4).items():
        monkeypatch.setenv(name, value)
    trainer = rank_trainer(4, ExpertParallelStrategy(expert_parallel, receive_limit=5))
    data = batches(0, 1, steps=1)
    with pytest.raises(ValueError, match=f"strategy.receive_limit=5 {message}"):
        trainer.fit(module, data, data)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatcher": "x"}, "strategy.dispatcher='x' must be one of all_to_all, static"),
        (
            {"dispatcher": "static", "overflow": "x"},
            "strategy.overflow='x' must be one of position, weight",
        ),
        (
            {"dispatcher": "static", "capacity_factor": 0.0},
            "capacity_factor=0.0 must be finite and between 0.001 and 10000",
        ),
        ({"dispatcher": "static", "capacity_factor": 1e-9}, "strategy.capacity_factor=1e-09 must"),
        (
            {"dispatcher": "static", "capacity_factor": 1e18},
            r"strategy.capacity_factor=1e\+18 must",
        ),
        (
            {"capacity_factor": 2.0},
            "strategy.capacity_factor=2.0 has no effect with strategy.dispatcher=all_to_all, which has "
            "receive_limit; unset it, or choose static",
        ),
        (
            {"dispatcher": StaticDispatch(), "overflow": "weight"},
            r"strategy.overflow=weight and strategy.dispatcher=StaticDispatch\(.*\) both give options",
        ),
        (
            {"dispatcher": "static", "warmup_tokens": 0},
            "strategy.warmup_tokens=0 must be at least 1",
        ),
        ({"dispatcher": "static", "receive_limit": 9}, "receive_limit=9 has no effect"),
        ({"receive_limit": 0}, "strategy.receive_limit=0 must be at least 1"),
        ({"bucket_mb": 0.0}, "strategy.bucket_mb=0.0 must be finite and between 1e-6"),
        ({"bucket_mb": 1e-9}, "strategy.bucket_mb=1e-09 must be finite and between 1e-6"),
        ({"bucket_mb": 1e308}, r"strategy.bucket_mb=1e\+308 must be finite and between 1e-6"),
        ({"timeout": 0}, "strategy.timeout=0 must be finite and between 1 second and 30 days"),
        ({"timeout": -1.0}, "strategy.timeout=-1.0 must be finite and between 1 second"),
        ({"timeout": 1e-9}, "strategy.timeout=1e-09 must be finite and between 1 second"),
        ({"timeout": 1e30}, r"strategy.timeout=1e\+30 must be finite and between 1 second"),
        ({"timeout": math.inf}, "strategy.timeout=inf must be finite"),
        ({"timeout": timedelta(0)}, "strategy.timeout=0.0 must be finite and between 1 second"),
        ({"timeout": timedelta.max}, "strategy.timeout=86400000000000.0 must be finite"),
        ({"start_method": "Popen"}, "strategy.start_method='Popen' must be one of popen, "),
        ({"start_method": None}, "strategy.start_method=None must be one of popen, "),
        ({"expert_parallel": 0}, "strategy.expert_parallel=0 must be a positive integer"),
        ({"expert_parallel": "foo"}, "strategy.expert_parallel='foo' must be a positive integer"),
        ({"expert_parallel": 1.5}, "strategy.expert_parallel=1.5 must be a positive integer"),
        ({"expert_parallel": True}, "strategy.expert_parallel=True must be a positive integer"),
    ],
)
@pytest.mark.usefixtures("shape_checker_off")
def test_options_that_can_not_work_are_refused_on_construction(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertParallelStrategy(**options)


@pytest.mark.parametrize("value", ["false", "auto", None, 0, []])
@pytest.mark.usefixtures("shape_checker_off")
def test_what_only_looks_like_true_or_false_is_refused_on_construction(value: object) -> None:
    options: dict[str, Any] = {"distributed_optimizer": value}
    with pytest.raises(TypeError) as error:
        ExpertParallelStrategy(**options)
    expected = f"strategy.distributed_optimizer={value!r} must be true or false, got "
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 1.0},
        {"timeout": timedelta(days=30)},
        {"bucket_mb": 1e-6},
        {"bucket_mb": 1e6},
        {"dispatcher": "static", "capacity_factor": 1e-3},
        {"dispatcher": "static", "capacity_factor": 1e4},
    ],
)
def test_the_ends_of_what_numbers_may_be_are_accepted(options: dict[str, Any]) -> None:
    strategy = ExpertParallelStrategy(**options)
    assert int(strategy.bucket_mb * 2**20) >= 1


def test_options_of_ddp_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(TypeError, match="no option 'find_unused_parameters'"):
        ExpertParallelStrategy(find_unused_parameters=True)


class WithOptimizer(Regression):
    """Any optimizer, built by its name."""

    def __init__(self, make: str) -> None:
        super().__init__(with_moe=True, with_window=False)
        self.make = make
        # In no list of submodules: the module doesn't know its parameters.
        self.hidden = [nn.Linear(6, 6)]

    def configure_optimizers(self) -> Any:
        if self.make == "foreign":
            return torch.optim.AdamW([*self.parameters(), *self.hidden[0].parameters()])
        if self.make == "Muon":
            return torch.optim.Muon([p for p in self.parameters() if p.dim() == 2])
        return getattr(torch.optim, self.make)(self.parameters())


def _optimizer(rank: int, world: int, make: str, ep: int, distributed: bool) -> str | None:
    data: list[Tensor] = [torch.zeros(2, 5, 6)]
    strategy = parallel(ep, distributed_optimizer=distributed)
    try:
        fit(rank, world, WithOptimizer(make), data, strategy=strategy, precision="32-true")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("make", "ep", "distributed", "message"),
    [
        ("Muon", 1, True, "Muon could not be tried out"),
        ("Adafactor", 1, True, "Adafactor updates a matrix differently in parts"),
        ("LBFGS", 1, True, "LBFGS could not be tried out"),
        ("LBFGS", 2, False, "LBFGS does not work with experts on several ranks"),
        ("foreign", 1, True, "AdamW holds a parameter that isn't one of the module's"),
        ("foreign", 2, False, "AdamW holds a parameter that isn't one of the module's"),
    ],
)
def test_optimizers_that_ranks_would_break_are_refused_on_all_ranks(
    make: str, ep: int, distributed: bool, message: str
) -> None:
    for error in run_ranks(_optimizer, 2, make, ep, distributed, timeout_s=120):
        assert error is not None
        assert message in error


@pytest.mark.parametrize("make", ["Muon", "Adafactor"])
def test_optimizers_over_whole_matrices_work_without_the_distributed_optimizer(make: str) -> None:
    assert run_ranks(_optimizer, 2, make, 1, False, timeout_s=120) == [None, None]
