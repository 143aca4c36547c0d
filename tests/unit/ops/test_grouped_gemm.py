"""The optional package's matmul, through a stand-in that keeps to its published contract."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import loop_grouped_mm
from lightning_moe.ops.grouped_gemm import grouped_gemm_mm, grouped_gemm_refusal

LOADS = [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 0], [6]]


def _gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False
) -> Tensor:
    """bfloat16 out whatever comes in; sizes in int64 on the host; contiguous operands; no call without rows."""
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.device.type == "cpu"
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert len(a) > 0
    assert int(batch_sizes.sum()) == len(a)
    parts = a.split(batch_sizes.tolist())
    if trans_a:
        pairs = zip(parts, b.split(batch_sizes.tolist()), strict=True)
        # A group without rows is left as it was allocated.
        products = [
            left.t() @ right if len(left) else torch.full((a.shape[1], b.shape[1]), torch.nan)
            for left, right in pairs
        ]
        return torch.stack(products).to(torch.bfloat16)
    return torch.cat(
        [part @ (w.t() if trans_b else w) for part, w in zip(parts, b, strict=True)]
    ).to(torch.bfloat16)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("grouped_gemm")
    module.__spec__ = ModuleSpec("grouped_gemm", None)
    module.ops = SimpleNamespace(gmm=_gmm)
    monkeypatch.setitem(sys.modules, "grouped_gemm", module)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("load", LOADS)
def test_equals_the_loop_with_gradients(
    load: list[int], layout: str, generator: torch.Generator
) -> None:
    shape = (len(load), 5, 7) if layout == "contiguous" else (len(load), 7, 5)
    weight = torch.randn(shape, generator=generator).bfloat16()
    weight = weight if layout == "contiguous" else weight.transpose(1, 2)
    rows = torch.randn(sum(load), 5, generator=generator).bfloat16()
    upstream = torch.randn(sum(load), 7, generator=generator).bfloat16()
    results = []
    for grouped_mm in (loop_grouped_mm, grouped_gemm_mm):
        leaves = rows.clone().requires_grad_(), weight.detach().requires_grad_()
        out = grouped_mm(*leaves, torch.tensor(load, dtype=torch.int32))
        results.append((out.detach(), *torch.autograd.grad(out, leaves, upstream)))
    for looped, ours in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, looped)
    assert results[1][2].stride() == weight.stride()


def test_a_missing_package_is_named_with_its_extra() -> None:
    refusal = str(grouped_gemm_refusal(torch.bfloat16, torch.device("cuda")))
    assert "grouped_gemm is not installed (pip install 'lightning-moe[grouped_gemm]')" in refusal


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        (torch.bfloat16, "cpu", "CUDA only, not on cpu"),
        (torch.float32, "cuda", "torch.bfloat16 only, not in torch.float32"),
        (torch.float16, "cuda", "torch.bfloat16 only, not in torch.float16"),
    ],
)
def test_device_and_type_are_refused_with_the_reason(
    dtype: torch.dtype, device: str, reason: str
) -> None:
    assert reason in str(grouped_gemm_refusal(dtype, torch.device(device)))


@pytest.mark.usefixtures("package")
def test_bfloat16_on_cuda_is_taken() -> None:
    assert grouped_gemm_refusal(torch.bfloat16, torch.device("cuda")) is None
