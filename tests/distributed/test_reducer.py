"""Gradients over ranks are those of the mean loss of everybody's tokens, reduced once and in one order."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_moe.nn import MoE
from lightning_moe.optim.sharded import ShardedState
from lightning_moe.parallel import GradientReducer, ParamLayout, ProcessMesh
from lightning_moe.parallel.replicas import sync_replicas
from tests.distributed.layers import Case, connect, spread
from tests.ranks import run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Dense, experts, dense; large enough that some parameters are split over two or four replicas."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.moe = Case(options={"expert_bias": True}).layer(torch.float32)
        self.wide = nn.Linear(6, 768)
        self.last = nn.Linear(768, 6, bias=False)
        self.unused = nn.Parameter(torch.zeros(5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.moe(self.first(x))
        return self.last(self.wide(y).tanh())


def _tokens(rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


class Setup:
    """A module on this rank with a reducer, and if `split`, an AdamW over parts."""

    def __init__(
        self,
        module: nn.Module,
        world: int,
        ep: int,
        *,
        split: bool = False,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.mesh, self.ledger = connect(world, ep)
        if any(isinstance(layer, MoE) for layer in module.modules()):
            spread(module, self.mesh, "all_to_all")
        self.module = module
        self.layout = ParamLayout(module, self.mesh, split=split)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable)
        self.sharded = ShardedState([self.optimizer], self.layout) if split else None
        targets = self.sharded.targets if self.sharded else {}
        self.reducer = GradientReducer(self.layout, targets, bucket_bytes=bucket_bytes)
        self.reducer.follow(self.optimizer)

    def backward(self, loss: Tensor, *, reduce: bool = True) -> None:
        """What the strategy does for one micro-batch."""
        self.reducer.enabled = reduce
        loss.backward()
        if reduce:
            self.reducer.finish()

    def gradients(self) -> Iterator[tuple[str, Tensor | None, slice]]:
        """What the optimizer reads, by name, and the flat part of the local tensor that it is for."""
        for name, spec in self.layout.specs.items():
            owner = self.layout.parameters[name]
            if self.sharded is not None:
                owner = self.sharded.targets.get(name, owner)
            yield name, owner.grad, slice(spec.chunk_start, spec.chunk_start + spec.chunk)


def _local(whole: Tensor, name: str, mesh: ProcessMesh) -> Tensor:
    """This rank's experts of a whole tensor."""
    if ".experts." not in f".{name}":
        return whole
    per_rank = len(whole) // mesh.ep.size
    return whole[mesh.ep.index * per_rank : (mesh.ep.index + 1) * per_rank]


def _check(setup: Setup, whole: nn.Module) -> None:
    """Every gradient equals that of the whole module on one rank; replicas have the same bits."""
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, gradient, part in setup.gradients():
        if expected[name] is None:
            assert gradient is None, name
            continue
        wanted = _local(expected[name], name, setup.mesh).flatten()[part]
        torch.testing.assert_close(
            gradient.flatten(), wanted, msg=lambda m, n=name: f"{n}: {m}", **CLOSE
        )
        spec = setup.layout.specs[name]
        if not spec.split:
            first = gradient.clone()
            setup.layout.replicas(spec).broadcast(first)
            assert torch.equal(first, gradient), name


def _one_step(rank: int, world: int, ep: int, split: bool) -> None:
    setup = Setup(Net(), world, ep, split=split)
    setup.backward(_loss(setup.module, _tokens(rank)))
    whole = Net()
    _loss(whole, torch.cat([_tokens(r) for r in range(world)])).backward()
    _check(setup, whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_expert_and_dense_gradients_are_exactly_those_of_the_global_mean(
    world: int, ep: int, split: bool
) -> None:
    run_ranks(_one_step, world, ep, split, timeout_s=120)


def _uneven(rank: int, world: int) -> None:
    """6 and 2 tokens, a mean over each rank's own: every parameter sees (g0 / 6 + g1 / 2) / 2."""
    sizes = (6, 2)
    tokens = [torch.cat([_tokens(r), _tokens(r, 1)])[: sizes[r]] for r in range(world)]
    setup = Setup(Net(), world, world)
    setup.backward(_loss(setup.module, tokens[rank]))
    whole = Net()
    ((_loss(whole, tokens[0]) + _loss(whole, tokens[1])) / 2).backward()
    _check(setup, whole)


def test_experts_and_dense_parameters_weight_uneven_ranks_alike() -> None:
    run_ranks(_uneven, 2)


def _accumulated(rank: int, world: int, ep: int, split: bool) -> list[tuple[str, str]]:
    setup = Setup(Net(), world, ep, split=split)
    losses = [_loss(setup.module, _tokens(rank, micro)) / 3 for micro in range(3)]
    setup.ledger.order.clear()
    for micro, loss in enumerate(losses):
        setup.backward(loss, reduce=micro == 2)
        if micro < 2:
            assert not [kind for kind, _ in setup.ledger.order if "reduce" in kind]
    whole = Net()
    for micro in range(3):
        (_loss(whole, torch.cat([_tokens(r, micro) for r in range(world)])) / 3).backward()
    _check(setup, whole)
    return [call for call in setup.ledger.order if "reduce" in call[0]]


@pytest.mark.parametrize(
    ("ep", "split", "expected"),
    [
        (1, False, [("all_reduce", "dense"), ("all_reduce", "ep_dp")]),
        (2, False, [("all_reduce", "dense")]),
        (1, True, [("reduce_scatter", "dense"), ("all_reduce", "dense"), ("all_reduce", "ep_dp")]),
        (2, True, [("reduce_scatter", "dense"), ("all_reduce", "dense")]),
    ],
)
def test_micro_batches_add_up_and_only_the_last_is_reduced_once_per_bucket(
    ep: int, split: bool, expected: list[tuple[str, str]]
) -> None:
    for calls in run_ranks(_accumulated, 2, ep, split):
        assert sorted(calls) == sorted(expected)


def _several_backwards(rank: int, world: int, ep: int, split: bool) -> None:
    """Manual optimisation: every backward of a step reduces."""
    setup = Setup(Net(), world, ep, split=split)
    for micro in range(3):
        setup.backward(_loss(setup.module, _tokens(rank, micro)))
    whole = Net()
    for micro in range(3):
        _loss(whole, torch.cat([_tokens(r, micro) for r in range(world)])).backward()
    _check(setup, whole)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_several_backwards_in_a_step_add_up(world: int, ep: int, split: bool) -> None:
    run_ranks(_several_backwards, world, ep, split, timeout_s=120)


def _launches(rank: int, world: int, bucket_bytes: int) -> tuple[list[tuple[int, bool]], ...]:
    module = Net()
    del module.unused
    setup = Setup(module, world, 1, bucket_bytes=bucket_bytes)
    found = []
    for micro in range(2):
        setup.backward(_loss(module, _tokens(rank, micro)))
        found.append(list(setup.reducer.launches))
    return tuple(found)


def test_buckets_leave_during_backward_in_one_order_on_all_ranks_and_steps() -> None:
    first, second = run_ranks(_launches, 2, 3000)
    assert first == second
    assert first[0] == first[1]
    numbers = [number for number, _ in first[0]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 4
    assert all(in_backward for _, in_backward in first[0])


def _launches_with_unused(rank: int, world: int) -> list[tuple[int, bool]]:
    """Rank 0 uses `late` only, rank 1 `early` only."""
    module = nn.ParameterDict({"early": torch.ones(2), "late": torch.ones(3)})
    setup = Setup(module, world, 1, bucket_bytes=1)
    used = module["late"] if rank == 0 else module["early"]
    setup.backward(used.sum())
    torch.testing.assert_close(module["early"].grad, torch.full((2,), 0.5))
    torch.testing.assert_close(module["late"].grad, torch.full((3,), 0.5))
    return setup.reducer.launches


def test_ranks_that_use_different_parameters_still_reduce_in_the_same_order() -> None:
    first, second = run_ranks(_launches_with_unused, 2)
    # Backward meets the last parameter first; rank 1 has to wait for `finish`.
    assert first == [(0, True), (1, False)]
    assert second == [(0, False), (1, False)]


def _message_sizes(rank: int, world: int, split: bool, bucket_bytes: int) -> list[int]:
    setup = Setup(Net(), world, 1, split=split, bucket_bytes=bucket_bytes)
    loss = _loss(setup.module, _tokens(rank))
    setup.ledger.sizes.clear()
    setup.backward(loss)
    return setup.ledger.sizes


@pytest.mark.parametrize("split", [False, True])
def test_messages_respect_the_limit_unless_one_parameter_is_larger(split: bool) -> None:
    limit, flags = 7000, 8 * 12 * 2
    (sizes, _) = run_ranks(_message_sizes, 2, split, limit)
    largest = 8 * 768 * 6
    assert all(size <= limit + flags or largest <= size <= largest + flags for size in sizes)
    assert sum(size > limit + flags for size in sizes) == 2
    total = 8 * sum(p.numel() for p in Net().parameters())
    assert total <= sum(sizes) <= total + flags
    one_message, _ = run_ranks(_message_sizes, 2, split, 2**20)
    assert len(one_message) == (3 if split else 2)


def _partly_unused(rank: int, world: int, split: bool) -> None:
    """`sometimes` has a gradient on rank 1 only, `never` on none."""
    module = nn.ParameterDict(
        {name: torch.ones(4096, dtype=torch.float64) for name in ("always", "sometimes", "never")}
    )
    setup = Setup(module, world, 1, split=split)
    for _ in range(2):
        setup.optimizer.zero_grad()
        loss = module["always"].sum()
        if rank == 1:
            loss = loss + 3 * module["sometimes"].sum()
        setup.backward(loss)
        found = {name: gradient for name, gradient, _ in setup.gradients()}
        assert found["never"] is None
        assert found["always"].unique().tolist() == [1.0]
        assert found["sometimes"].unique().tolist() == [1.5]


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_missing_on_one_rank_counts_as_zero_and_on_all_stays_none(split: bool) -> None:
    run_ranks(_partly_unused, 2, split)


def _only_in_an_earlier_micro_batch(rank: int, world: int, split: bool) -> None:
    module = nn.ParameterDict({name: torch.ones(4096) for name in ("early", "late")})
    setup = Setup(module, world, 1, split=split)
    setup.backward((rank + 1.0) * module["early"].sum(), reduce=False)
    setup.backward(module["late"].sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["early"].unique().tolist() == [1.5]
    assert found["late"].unique().tolist() == [1.0]


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_of_an_earlier_micro_batch_only_is_not_lost(split: bool) -> None:
    run_ranks(_only_in_an_earlier_micro_batch, 2, split)


def _low_precision_sums(rank: int, world: int, numel: int, split: bool) -> None:
    """1 + 64 * 2^-9 = 1.125; in bfloat16 every small term would be rounded away."""
    module = nn.ParameterDict({"w": torch.zeros(numel, dtype=torch.bfloat16)})
    setup = Setup(module, world, 1, split=split)
    for micro in range(65):
        scale = 1.0 if micro == 0 else 2.0**-9
        setup.backward(scale * module["w"].sum(), reduce=micro == 64)
    ((_, gradient, _),) = setup.gradients()
    assert gradient.unique().tolist() == [1.125]
    assert gradient.dtype == (torch.float32 if split else torch.bfloat16)


@pytest.mark.parametrize(("numel", "split"), [(3, False), (3, True), (4096, False), (4096, True)])
def test_low_precision_gradients_add_up_in_float32(numel: int, split: bool) -> None:
    run_ranks(_low_precision_sums, 2, numel, split)


def _means_in_float32(rank: int, world: int) -> None:
    """Rank 0 gives 1, the three others 2^-8: the mean of their float32 sum, rounded once."""
    module = nn.ParameterDict({"w": torch.zeros(4096, dtype=torch.bfloat16)})
    setup = Setup(module, world, 1, split=True)
    setup.backward((1.0 if rank == 0 else 2.0**-8) * module["w"].sum())
    ((_, gradient, _),) = setup.gradients()
    assert gradient.unique().tolist() == [(1 + 3 * 2.0**-8) / 4]


def test_ranks_add_up_in_float32() -> None:
    run_ranks(_means_in_float32, 4, timeout_s=120)


def _frozen(rank: int, world: int, trainable: str) -> None:
    nets = [Net(), Net()]
    for net in nets:
        for name, parameter in net.named_parameters():
            experts = ".experts." in name
            parameter.requires_grad_(experts == (trainable == "experts"))
    setup = Setup(nets[0], world, world)
    setup.backward(_loss(setup.module, _tokens(rank)))
    _loss(nets[1], torch.cat([_tokens(r) for r in range(world)])).backward()
    _check(setup, nets[1])


@pytest.mark.parametrize("trainable", ["experts", "dense"])
def test_models_with_frozen_parts_reduce_the_rest(trainable: str) -> None:
    run_ranks(_frozen, 2, trainable)


def _without_moe(rank: int, world: int) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(6, 3).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    setup = Setup(nets[0], world, 1)
    setup.backward(_loss(nets[0], _tokens(rank)))
    _loss(nets[1], torch.cat([_tokens(r) for r in range(world)])).backward()
    _check(setup, nets[1])


def test_a_model_without_moe_layers_is_plain_data_parallel() -> None:
    run_ranks(_without_moe, 2)


def _unfrozen(rank: int, world: int) -> None:
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(3)})
    module["a"].requires_grad_(False)
    setup = Setup(module, world, 1)
    module["a"].requires_grad_()
    setup.backward(module["a"].sum() + module["b"].sum())


def test_a_parameter_unfrozen_after_the_start_is_refused_not_left_unreduced() -> None:
    with pytest.raises(RuntimeError, match="parameter a was frozen when fit began"):
        run_ranks(_unfrozen, 2)


def _discarded(rank: int, world: int, dtype: torch.dtype, split: bool) -> None:
    """Two micro-batches are thrown away by `zero_grad`, then one counts."""
    module = nn.ParameterDict({name: torch.zeros(4096, dtype=dtype) for name in ("w", "v")})
    small = module["small"] = nn.Parameter(torch.zeros(3, dtype=dtype))
    setup = Setup(module, world, 1, split=split)
    setup.backward(7 * (module["w"].sum() + small.sum()), reduce=False)
    setup.backward(7 * module["v"].sum(), reduce=False)
    setup.optimizer.zero_grad()
    setup.backward(module["w"].sum() + small.sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["w"].unique().tolist() == found["small"].unique().tolist() == [1.0]
    assert found["v"] is None


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_grad_discards_what_was_accumulated(dtype: torch.dtype, split: bool) -> None:
    run_ranks(_discarded, 2, dtype, split)


def _toggled(rank: int, world: int) -> None:
    """The optimizer's parameter is frozen for one backward: the model's keeps what it had."""
    module = nn.ParameterDict({name: torch.zeros(4096) for name in ("w", "v")})
    setup = Setup(module, world, 1, split=True)
    assert setup.sharded is not None
    setup.backward(2 * module["w"].sum(), reduce=False)
    setup.sharded.targets["w"].requires_grad_(False)
    setup.backward(5 * module["w"].sum() + 3 * module["v"].sum(), reduce=False)
    setup.sharded.targets["w"].requires_grad_()
    setup.backward(0 * module["v"].sum())
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    assert found["w"].unique().tolist() == [2.0]
    assert found["v"].unique().tolist() == [3.0]


def test_a_parameter_toggled_off_takes_no_gradient_and_keeps_its_earlier_one() -> None:
    run_ranks(_toggled, 2)


def _weight_penalty(_rank: int, world: int, ep: int) -> None:
    """A loss of the weights alone, as every rank has it; 0 for the experts it doesn't hold."""
    setup = Setup(Net(), world, ep)
    experts = dict(setup.module.named_parameters())["moe.experts.w_down"]
    setup.backward(experts.square().sum() / 2)
    found = {name: gradient for name, gradient, _ in setup.gradients()}
    torch.testing.assert_close(found["moe.experts.w_down"], experts.detach(), **CLOSE)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_loss_of_an_experts_weights_alone_counts_once(ep: int) -> None:
    run_ranks(_weight_penalty, 2, ep)


def _detached(rank: int, world: int) -> None:
    module = nn.ParameterDict({"w": torch.zeros(3)})
    setup = Setup(module, world, 1)
    setup.reducer.detach()
    setup.ledger.clear()
    (float(rank) * module["w"].sum()).backward()
    assert module["w"].grad.unique().tolist() == [float(rank)]
    assert not setup.ledger.calls


def test_without_its_hooks_gradients_stay_local() -> None:
    run_ranks(_detached, 2)


def _order_by_layer(rank: int, world: int) -> list[tuple[str, str]]:
    """MoE first and dense last, or the other way round: groups differ, the order may not."""
    orders = []
    for layers in (["moe", "linear"], ["linear", "moe"]):
        torch.manual_seed(0)
        module = nn.ModuleDict(
            {n: Case().layer() if n == "moe" else nn.Linear(6, 6).double() for n in layers}
        )
        setup = Setup(module, world, 2, bucket_bytes=500)
        x = _tokens(rank)
        for name in layers:
            x = module[name](x)[0] if name == "moe" else module[name](x)
        setup.ledger.order.clear()
        setup.backward(x.square().mean())
        orders.append(list(setup.ledger.order))
    return orders


def test_four_ranks_issue_reductions_of_both_groups_in_one_order() -> None:
    results = run_ranks(_order_by_layer, 4, timeout_s=120)
    assert all(before == after for before, after in pairwise(results))
    assert {axis for _, axis in results[0][0]} == {"dense", "ep_dp", "ep"}


def _specs(rank: int, world: int) -> dict[str, str]:
    """Roles survive what re-creates parameters: casts, new tensors, compiled wrappers."""
    mesh, _ = connect(world)
    module = Net(torch.float32)
    spread(module, mesh, "all_to_all")
    module = module.to(torch.bfloat16)
    module.moe.experts.w_down = nn.Parameter(module.moe.experts.w_down.detach().clone())
    wrapped = torch.compile(module)
    layout = ParamLayout(wrapped, mesh, split=True)
    whole = sum(p.numel() for p in Net().parameters())
    assert sum(spec.global_numel for spec in layout.specs.values()) == whole
    return {name: spec.kind for name, spec in layout.specs.items()}


def test_only_routed_experts_count_as_experts_whatever_happened_to_the_parameters() -> None:
    for kinds in run_ranks(_specs, 2):
        experts = sorted(name for name, kind in kinds.items() if kind == "expert")
        assert experts == [
            f"moe.experts.{name}" for name in ("b_down", "b_up_gate", "w_down", "w_up_gate")
        ]
        assert not [name for name in kinds if "_orig_mod" in name]


def _replicas(rank: int, world: int) -> list[float]:
    """Every rank starts with its own random weights."""
    mesh, _ = connect(world, ep=2)
    module = nn.ModuleDict({"moe": Case(num_experts=4).layer(), "norm": nn.BatchNorm1d(3)})
    spread(module, mesh, "all_to_all")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(rank)
    layout = ParamLayout(module, mesh, split=False)
    sync_replicas(module, layout)
    for name, spec in layout.specs.items():
        first = 0 if spec.kind == "dense" else mesh.ep.index
        assert layout.parameters[name].unique().tolist() == [first], name
    return [buffer.double().mean().item() for buffer in module.buffers()]


def test_replicas_start_from_the_first_one_and_different_experts_stay_different() -> None:
    assert all(
        value == 0.0 for buffers in run_ranks(_replicas, 4, timeout_s=120) for value in buffers
    )
