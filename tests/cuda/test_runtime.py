"""What the runtime without a device sees, refuses and computes, checked on operators of known behaviour."""

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cuda.values import Values
from tests.cuda.waits import HostWaits, launches

CUDA = torch.device("cuda", 0)
CAPABILITIES = [(9, 0), (9, 0), (10, 0), (8, 0), (12, 0), (10, 3)]

WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "cpu, not blocking": lambda x: torch.empty(7).copy_(x, non_blocking=True),
    "tensor from numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 3],
    "bool": lambda x: bool(x.any()),
    "equal": lambda x: torch.equal(x, x + 1),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING: dict[str, Callable[[Tensor], object]] = {
    "kernels": lambda x: (x * 2).sum().cumsum(0),
    "sort": lambda x: x.sort(stable=True),
    "full": lambda x: torch.full((3,), 2.0, device=x.device),
    "pinned copy": lambda x: torch.empty(7, pin_memory=True).copy_(x, non_blocking=True),
    "masked_fill": lambda x: x.masked_fill(x > 3, 0.0),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_wait_is_noted_with_its_line(name: str) -> None:
    x = torch.arange(7.0).to(CUDA)
    with Values(), HostWaits() as waits:
        WAITING[name](x)
    (wait,) = waits.found
    assert wait.file == __file__
    assert f'"{name}": lambda' in linecache.getline(__file__, wait.line)


@pytest.mark.parametrize("name", NOT_WAITING)
def test_work_that_does_not_wait_is_not_noted(name: str) -> None:
    x = torch.arange(7.0).to(CUDA)
    NOT_WAITING[name](x)
    with HostWaits() as waits:
        NOT_WAITING[name](x)
    assert not waits.found


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


def test_a_wait_in_a_backward_thread_is_noted() -> None:
    x = torch.ones(3, device=CUDA, requires_grad=True)
    y = _Reads.apply(x).sum()
    with HostWaits() as waits:
        y.backward()
    assert [wait.function for wait in waits.found] == ["backward"]


def test_devices_have_the_capabilities_that_decide_something() -> None:
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    assert found == CAPABILITIES


def test_kernels_are_launched_and_a_launch_beyond_the_limits_is_refused() -> None:
    before = launches()
    x = torch.zeros(4, 4, device=CUDA) + 1
    assert launches() > before
    # torch puts channels into the grid's second dimension, which has 65,535 places.
    wide = torch.empty(1, 70_000, 4, 4, device=CUDA)
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        torch.nn.functional.fractional_max_pool2d(wide, 2, output_size=2)
    assert x.shape == (4, 4)


def test_values_are_those_of_the_cpu_also_where_sizes_depend_on_them() -> None:
    x = torch.tensor([3.0, -1.0, 2.0, 0.0])
    with Values():
        moved = x.to(CUDA)
        found = [
            moved.cumsum(0),
            moved.sort(stable=True).indices,
            moved.nonzero(),
            moved[moved > 0],
        ]
    expected = [x.cumsum(0), x.sort(stable=True).indices, x.nonzero(), x[x > 0]]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_cuda
        assert torch.equal(ours.cpu(), theirs)


def test_without_values_kernels_write_nothing() -> None:
    x = torch.full((3,), 2.0, device=CUDA)
    assert x.cpu().tolist() != [2.0, 2.0, 2.0]


def test_an_operator_without_a_cpu_version_is_named() -> None:
    def call() -> None:
        with Values():
            q = torch.zeros(1, 2, 16, 32, device=CUDA, dtype=torch.bfloat16)
            torch.ops.aten._flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False)

    with pytest.raises(RuntimeError, match=r"operators without right values: .*_flash_attention"):
        call()


def test_a_replayed_graph_computes_from_what_its_inputs_hold_then() -> None:
    with Values():
        x = torch.tensor([1.0, 2.0]).to(CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 3).cumsum(0)
        x.copy_(torch.tensor([5.0, 7.0]))
        assert y.cpu().tolist() == [3.0, 9.0]
        graph.replay()
        assert y.cpu().tolist() == [15.0, 36.0]


def test_a_wait_while_a_graph_is_captured_is_refused() -> None:
    x = torch.ones(3, device=CUDA)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            (x * 2).sum().item()

    with pytest.raises(RuntimeError, match="error during capture"):
        capture()
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_torch_itself_can_make_a_wait_an_error() -> None:
    x = torch.ones(3, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
