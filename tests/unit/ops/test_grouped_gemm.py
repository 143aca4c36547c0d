"""The optional package's matmul, through a stand-in with the signatures and checks of grouped_gemm 0.3.0."""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import loop_grouped_mm
from lightning_moe.ops.grouped_gemm import grouped_gemm_mm, grouped_gemm_refusal

_PARTS = "grouped_gemm.ops", "grouped_gemm.backend"
LOADS = [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 0], [6]]


def _allocated(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    """As `_allocate_output` of the package's backend.py."""
    assert not (trans_a and trans_b)
    assert batch_sizes.ndim == 1
    assert a.ndim == 2
    assert b.ndim == (2 if trans_a else 3)
    shape = (
        (batch_sizes.shape[0], a.shape[1], b.shape[1])
        if trans_a
        else (a.shape[0], (b.shape[1] if trans_b else b.shape[2]))
    )
    return torch.full(shape, torch.nan, dtype=a.dtype)


def _gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """Signature of the package's backend.py; checks of `GroupedGemm` in its grouped_gemm.cu, but for the device."""
    c = _allocated(a, b, batch_sizes, trans_a, trans_b) if c is None else c
    assert batch_sizes.is_cpu
    assert batch_sizes.dtype == torch.int64
    assert all(matrix.dtype == torch.bfloat16 for matrix in (a, b, c))
    assert all(matrix.is_contiguous() for matrix in (a, b, c))
    assert b.shape[0] == (len(a) if trans_a else len(batch_sizes))
    assert trans_a or b.shape[2 if trans_b else 1] == a.shape[1]
    starts = [0, *batch_sizes.cumsum(0).tolist()]
    for group, (start, end) in enumerate(pairwise(starts)):
        # It doesn't write the product of a group without rows.
        if start < end and trans_a:
            c[group] = a[start:end].t() @ b[start:end]
        elif start < end:
            c[start:end] = a[start:end] @ (b[group].t() if trans_b else b[group])
    return c


def _ops_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """The package's ops.py, whose backward isn't ours."""
    return _gmm(a, b, batch_sizes, trans_a=False, trans_b=trans_b)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("grouped_gemm", *_PARTS)}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["grouped_gemm.ops"].gmm = _ops_gmm
    modules["grouped_gemm.backend"].gmm = _gmm
    for name in _PARTS:
        setattr(modules["grouped_gemm"], name.split(".")[1], modules[name])


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
    assert "not installed (pip install --no-build-isolation grouped_gemm" in refusal


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
