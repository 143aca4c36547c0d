"""One rank of 8, 64 and 512 with CUDA tensors: shapes, devices and waits of both transports, forward and backward.

torch's fake process group sends nothing: what a rank would receive is what it holds already.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.nn import MoE
from lightning_moe.parallel import AllToAllDispatch, AxisGroup, Ledger, StaticDispatch
from lightning_moe.parallel.apply import apply_expert_parallel
from lightning_moe.parallel.mesh import MeshShape
from tests.cuda.table import row
from tests.cuda.values import Values
from tests.cuda.waits import HostWaits

CUDA, TOKENS = torch.device("cuda", 0), 1024
TRANSPORTS = {
    "all_to_all": (AllToAllDispatch(), 1),
    "static": (StaticDispatch(warmup_tokens=TOKENS), 0),
}


@pytest.fixture(params=[8, 64, 512])
def group(request: pytest.FixtureRequest) -> Iterator[AxisGroup]:
    world = request.param
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    yield AxisGroup("ep", tuple(range(world)), 0, dist.group.WORLD, Ledger())
    dist.destroy_process_group()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("backend", ["torch", "fp8_rowwise"])
def test_a_rank_waits_once_per_layer_with_all_to_all_and_never_with_static(
    name: str, backend: str, group: AxisGroup
) -> None:
    world = group.size
    transport, expected = TRANSPORTS[name]
    router = RouterConfig(top_k=4)
    config = MoEConfig(num_experts=2 * world, hidden_size=64, backend=backend, router=router)
    torch.manual_seed(0)
    layer = MoE(64, config)
    shape = MeshShape(world=world, ep=world)
    apply_expert_parallel(layer, shape, 0, lambda own: transport.build(group, own.config))
    layer = layer.to(CUDA, torch.bfloat16)
    x = torch.randn(TOKENS, 64).to(CUDA, torch.bfloat16).requires_grad_()
    with Values(), HostWaits("lightning_moe") as waits:
        for _ in range(2):  # what a layer makes once doesn't count
            waits.clear()
            y, _ = layer(x)
            y.sum().backward()
    row(f"{name} with {backend}, {world} ranks", {}, f"waits {waits.by_name()}")
    assert waits.total() == expected
    assert y.shape == x.shape
    assert y.device == x.grad.device == CUDA
    assert layer.experts.w_down.grad.shape == (2, 64, 64)
