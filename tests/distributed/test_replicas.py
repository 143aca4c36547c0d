"""Which parameters have replicas, and that these start equal."""

import torch
from torch import nn

from lightning_moe.parallel import ParamLayout
from lightning_moe.parallel.replicas import sync_replicas
from tests.kit.ranks import run_ranks
from tests.kit.reducer_runs import Net
from tests.kit.spread_layers import Case, connect, spread


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
        first = 0 if spec.kind == "non_expert" else mesh.ep.index
        assert layout.parameters[name].unique().tolist() == [first], name
    return [buffer.double().mean().item() for buffer in module.buffers()]


def test_replicas_start_from_the_first_one_and_different_experts_stay_different() -> None:
    assert all(
        value == 0.0 for buffers in run_ranks(_replicas, 4, timeout_s=120) for value in buffers
    )
