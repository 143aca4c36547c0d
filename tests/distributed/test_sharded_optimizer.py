"""An optimizer over parts gives the weights that the whole optimizer gives, for less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_moe.optim.sharded import ShardedState
from lightning_moe.parallel import GradientReducer, ParamLayout, ProcessMesh
from tests.kit.optimizers import SignDescent
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import Case, connect, spread

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "sign": lambda p: SignDescent(p, 0.01),
}


class Net(nn.Module):
    """Split and replicated parameters, dense and experts."""

    def __init__(self, dtype: torch.dtype = torch.float64, hidden: int = 400) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide = nn.Linear(6, 768)
        self.last = nn.Linear(768, 6, bias=False)
        self.moe = Case(num_experts=4, options={"expert_bias": True}).layer()
        self.moe.experts.w_up_gate = nn.Parameter(torch.randn(4, 2 * hidden, 6))
        self.moe.experts.w_down = nn.Parameter(torch.randn(4, hidden, 6) / hidden)
        self.moe.experts.b_up_gate = nn.Parameter(torch.randn(4, 2 * hidden))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.last(self.wide(x).tanh()))[0]


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    biases = [p for p in module.parameters() if p.dim() == 1]
    others = [p for p in module.parameters() if p.dim() != 1]
    return [{"params": others}, {"params": biases, "lr": 0.003, "weight_decay": 0.0}]


def _tokens(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype)


def _shard(module: nn.Module, optimizer: Optimizer, mesh: ProcessMesh) -> ShardedState:
    layout = ParamLayout(module, mesh, split=True)
    return ShardedState([optimizer], layout)


def _local(whole: Tensor, name: str, mesh: ProcessMesh) -> Tensor:
    if ".experts." not in name:
        return whole
    per_rank = len(whole) // mesh.ep.size
    return whole[mesh.ep.index * per_rank : (mesh.ep.index + 1) * per_rank]


def _equals_whole(rank: int, world: int, ep: int, name: str) -> None:
    mesh, _ = connect(world, ep)
    module, whole = spread(Net(), mesh, "all_to_all"), Net()
    optimizer, reference = (OPTIMIZERS[name](_groups(m)) for m in (module, whole))
    schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in (optimizer, reference)]
    sharded = _shard(module, optimizer, mesh)
    reducer = GradientReducer(sharded.layout, sharded.targets)
    for step in range(4):
        for each in (optimizer, reference):
            each.zero_grad()
        module(_tokens(step, rank, torch.float64)).square().mean().backward()
        reducer.finish()
        everyone = torch.cat([_tokens(step, r, torch.float64) for r in range(world)])
        whole(everyone).square().mean().backward()
        for each in (optimizer, reference, *schedulers):
            each.step()
        wanted = dict(whole.named_parameters())
        for path, parameter in module.named_parameters():
            expected = _local(wanted[path], path, mesh)
            torch.testing.assert_close(
                parameter, expected, rtol=1e-9, atol=1e-11, msg=lambda m, p=path: f"{p}: {m}"
            )
            first = parameter.detach().clone()
            sharded.layout.replicas(sharded.layout.specs[path]).broadcast(first)
            assert torch.equal(first, parameter), path
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    splits = [spec.kind for spec in sharded.layout.specs.values() if spec.split]
    assert splits.count("non_expert") == 2
    assert splits.count("expert") == (0 if ep == world else 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2)])
def test_weights_equal_those_of_the_whole_optimizer_and_replicas_bit_for_bit(
    world: int, ep: int, name: str
) -> None:
    run_ranks(_equals_whole, world, ep, name, timeout_s=120)


@pytest.mark.parametrize("ep", [1, 2])
def test_weights_on_four_ranks_equal_those_of_the_whole_optimizer(ep: int) -> None:
    run_ranks(_equals_whole, 4, ep, "adamw_fused", timeout_s=180)


def _masters(rank: int, world: int) -> None:
    """Weights in bfloat16, updates too small for it: what counts is the float32 master."""
    mesh, _ = connect(world, ep=1)
    dtype = torch.bfloat16
    module, whole = Net(dtype), Net(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    sharded = _shard(module, optimizer, mesh)
    reducer = GradientReducer(sharded.layout, sharded.targets)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in whole.named_parameters()}
    reference = torch.optim.AdamW(masters.values(), lr=1e-4)
    for step in range(6):
        optimizer.zero_grad()
        x = _tokens(step, 0, dtype)  # the same on all ranks: a mean of equal values is exact
        for each in (module, whole):
            each.zero_grad()
            each(x).float().square().mean().backward()
        reducer.finish()
        for name, parameter in whole.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        reference.step()
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(masters[name])
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    for name, target in sharded.targets.items():
        spec = sharded.layout.specs[name]
        part = masters[name].detach().flatten()[spec.chunk_start :][: spec.chunk]
        torch.testing.assert_close(target.detach(), part, rtol=1e-6, atol=1e-8)
        assert target.dtype == torch.float32


def test_low_precision_weights_follow_exactly_the_rounded_float32_masters() -> None:
    run_ranks(_masters, 2)


def _bytes(rank: int, world: int, ep: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per parameter that live between backward and step, counted from storages."""
    mesh, _ = connect(world, ep)
    module = spread(Net(dtype, hidden=1024), mesh, "all_to_all")
    optimizer = torch.optim.AdamW(module.parameters())
    sharded = _shard(module, optimizer, mesh)
    reducer = GradientReducer(sharded.layout, sharded.targets)
    for step in range(2):
        optimizer.zero_grad()
        module(_tokens(step, rank, dtype)).square().mean().backward()
        # Gradients of low-precision weights are float32 sums by now, and lie beside them.
        whole_gradients = {n: sums.nbytes for n, sums in reducer._wide_sums.items()}
        reducer.finish()
        if step == 0:
            optimizer.step()
    found = {}
    for name in ("wide.weight", "last.weight", "moe.experts.w_up_gate"):
        spec, weight = sharded.layout.specs[name], sharded.layout.parameters[name]
        owner = sharded.targets.get(name, weight)
        moments = [v for v in optimizer.state[owner].values() if v.dim()]
        assert len(moments) == 2
        assert weight.grad is None or owner is weight
        shared = owner.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        total = weight.nbytes + sum(m.nbytes for m in moments) + (0 if shared else owner.nbytes)
        total += whole_gradients.get(name, 4 * weight.numel())
        found[name] = total / spec.global_numel
    return found


@pytest.mark.parametrize(
    ("world", "ep", "dense", "experts"),
    [
        # bfloat16: weight 2 and gradient 4 on every replica; master 4 and moments 8 spread over all.
        (2, 1, 6 + 12 / 2, 6 + 12 / 2),
        (2, 2, 6 + 12 / 2, 6 / 2 + 12 / 2),
        (4, 2, 6 + 12 / 4, 6 / 2 + 12 / 4),
    ],
)
def test_bytes_per_bfloat16_parameter(world: int, ep: int, dense: float, experts: float) -> None:
    for found in run_ranks(_bytes, world, ep, torch.bfloat16, timeout_s=120):
        assert found["wide.weight"] == found["last.weight"] == pytest.approx(dense)
        assert found["moe.experts.w_up_gate"] == pytest.approx(experts)


def test_a_float32_parameter_is_its_own_master() -> None:
    for found in run_ranks(_bytes, 2, 1, torch.float32):
        assert found["wide.weight"] == pytest.approx(8 + 8 / 2)


def _state_parts(rank: int, world: int) -> None:
    mesh, _ = connect(world, ep=1)
    module = Net()
    optimizer = torch.optim.AdamW(_groups(module))
    identity = id(optimizer)
    sharded = _shard(module, optimizer, mesh)
    assert id(optimizer) == identity
    assert type(optimizer) is torch.optim.AdamW
    reducer = GradientReducer(sharded.layout, sharded.targets)
    module(_tokens(0, rank, torch.float64)).square().mean().backward()
    reducer.finish()
    optimizer.step()
    for name, spec in sharded.layout.specs.items():
        owner = sharded.targets.get(name, sharded.layout.parameters[name])
        assert owner.numel() == spec.chunk
        for value in optimizer.state[owner].values():
            assert value.numel() in (1, spec.chunk)
    restored = torch.optim.AdamW(
        [
            {"params": [nn.Parameter(p.detach().clone()) for p in g["params"]]}
            for g in optimizer.param_groups
        ]
    )
    restored.load_state_dict(optimizer.state_dict())
    assert len(restored.state) == len(optimizer.state)


def test_the_optimizer_stays_the_object_it_was_and_holds_state_for_its_part_only() -> None:
    run_ranks(_state_parts, 2)


def _loaded_weights(rank: int, world: int) -> None:
    mesh, _ = connect(world, ep=1)
    module = Net(torch.bfloat16)
    sharded = _shard(module, torch.optim.AdamW(module.parameters()), mesh)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    sharded.refresh_masters()
    assert all(target.unique().tolist() == [0.5] for target in sharded.targets.values())
    with torch.no_grad():
        for target in sharded.targets.values():
            target.fill_(0.25 + rank)
    sharded.publish()
    for name, spec in sharded.layout.specs.items():
        parameter = sharded.layout.parameters[name]
        if name not in sharded.targets:  # the router, which stays float32
            assert (parameter == 0.5).all()
        elif spec.split:
            halves = parameter.view(2, -1)
            assert (halves[0] == 0.25).all()
            assert (halves[1] == 1.25).all()
        else:
            assert (parameter == 0.25 + rank).all()


def test_masters_are_taken_from_loaded_weights_and_given_back_part_by_part() -> None:
    run_ranks(_loaded_weights, 2)


def _strided(rank: int, world: int) -> None:
    """A transposed parameter has no flat view; it stays replicated and is updated all the same."""
    mesh, _ = connect(world, ep=1)
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.zeros(64, 65, dtype=dtype).t())
        module = nn.ParameterDict({"w": weight})
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        sharded = _shard(module, optimizer, mesh)
        assert not sharded.layout.specs["w"].split
        reducer = GradientReducer(sharded.layout, sharded.targets)
        mix = torch.arange(65 * 64).view(65, 64) % 7
        (weight * mix * (2 * rank)).sum().backward()
        reducer.finish()
        optimizer.step()
        assert torch.equal(weight, -mix.to(dtype))


def test_a_parameter_that_is_not_contiguous_is_updated_whole() -> None:
    run_ranks(_strided, 2)


def _shared_by_two(rank: int, world: int) -> None:
    mesh, _ = connect(world, ep=1)
    module = nn.ParameterDict({"w": torch.zeros(4096)})
    optimizers = [torch.optim.SGD(module.parameters(), lr=lr) for lr in (1.0, 10.0)]
    sharded = ShardedState(optimizers, ParamLayout(module, mesh, split=True))
    reducer = GradientReducer(sharded.layout, sharded.targets)
    module["w"].sum().backward()
    reducer.finish()
    for optimizer in optimizers:
        optimizer.step()
    assert module["w"].unique().tolist() == [-11.0]


def test_two_optimizers_of_one_parameter_both_move_it() -> None:
    run_ranks(_shared_by_two, 2)


def _foreign(rank: int, world: int) -> None:
    mesh, _ = connect(world, ep=1)
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(2))], lr=1.0)
    _shard(module, optimizer, mesh)


def test_a_parameter_outside_of_the_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match="SGD holds a parameter that isn't one of the module's"):
        run_ranks(_foreign, 2)
