"""Grouped matmul: the loop against its definition, torch's kernel against the loop."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from lightning_moe.ops import loop_grouped_mm, torch_grouped_mm
from lightning_moe.ops.grouped_mm import GroupedMatmul, torch_grouped_mm_refusal

LOADS = {
    "uneven": [3, 0, 5, 1],
    "all on one": [0, 9, 0, 0],
    "no rows": [0, 0, 0, 0],
    "idle ends": [0, 4, 4, 0],
    "one group": [6],
}
EACH_LOAD = pytest.mark.parametrize("load", LOADS)
LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "transposed"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _inputs(
    load: str, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (R, 8), weight (G, 8, 16) in either memory layout, counts (G)."""
    counts = torch.tensor(LOADS[load])
    shape = (len(counts), 8, 16) if layout == "contiguous" else (len(counts), 16, 8)
    weight = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.randn(int(counts.sum()), 8, generator=generator).to(dtype)
    return rows, weight if layout == "contiguous" else weight.transpose(1, 2), counts


def _poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    kept = [torch.full((size,), torch.nan) for size in (64, 128, 256, 512, 1024) for _ in range(64)]
    del kept


def test_loop_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = torch.tensor([[[1.0], [10.0]], [[7.0], [7.0]], [[2.0], [0.5]]])
    out = loop_grouped_mm(rows, weight, torch.tensor([2, 0, 1]))
    assert out.tolist() == [[21.0], [43.0], [13.0]]


@EACH_LOAD
def test_gradients_of_the_loop(load: str, generator: torch.Generator) -> None:
    counts = torch.tensor(LOADS[load])
    rows = torch.randn(int(counts.sum()), 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(counts), 3, 5, generator=generator, dtype=torch.float64)
    leaves = rows.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda r, w: loop_grouped_mm(r, w, counts), leaves)


@pytest.mark.parametrize("grouped_mm", [loop_grouped_mm, torch_grouped_mm])
@LAYOUTS
@EACH_LOAD
def test_groups_without_rows_get_exactly_zero_gradient(
    grouped_mm: object, layout: str, load: str, generator: torch.Generator
) -> None:
    rows, weight, counts = _inputs(load, layout, torch.float32, generator)
    rows.requires_grad_()
    weight = weight.detach().requires_grad_()
    out = grouped_mm(rows, weight, counts)
    _poison()
    out.square().sum().backward()
    assert torch.equal(weight.grad[counts == 0], torch.zeros_like(weight[counts == 0]))
    assert weight.grad[counts > 0].abs().sum(dim=(1, 2)).gt(0).all()


@DTYPES
@LAYOUTS
@EACH_LOAD
def test_torch_equals_the_loop_with_gradients(
    load: str, layout: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows, weight, counts = _inputs(load, layout, dtype, generator)
    upstream = torch.randn(len(rows), 16, generator=generator).to(dtype)
    results = []
    for grouped_mm in (loop_grouped_mm, torch_grouped_mm):
        leaves = rows.clone().requires_grad_(), weight.detach().requires_grad_()
        out = grouped_mm(*leaves, counts)
        _poison()
        results.append((out.detach(), *torch.autograd.grad(out, leaves, upstream)))
    for looped, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, looped)


@LAYOUTS
def test_weight_gradient_has_the_memory_layout_of_the_weight(
    layout: str, generator: torch.Generator
) -> None:
    rows, weight, counts = _inputs("uneven", layout, torch.float32, generator)
    weight = weight.detach().requires_grad_()
    torch_grouped_mm(rows, weight, counts).square().sum().backward()
    assert weight.grad.stride() == weight.stride()
    (gradient,) = torch.autograd.grad(torch_grouped_mm(rows, weight, counts).square().sum(), weight)
    assert gradient.stride() == weight.stride()


@LAYOUTS
@DTYPES
def test_expanded_gradients_are_taken(
    layout: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows, weight, counts = _inputs("uneven", layout, dtype, generator)
    weight = weight.detach().requires_grad_()
    torch_grouped_mm(rows, weight, counts).sum().backward()
    # d sum / d weight[g, x, y] = sum of the group's rows, for every y.
    sums = torch.stack([part.float().sum(dim=0) for part in rows.split(counts.tolist())])
    # bf16: one rounding of the result, 2^-8 relative.
    tolerance = {"rtol": 8e-3, "atol": 8e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(
        weight.grad.float(), sums[:, :, None].expand(-1, -1, 16).contiguous(), **tolerance
    )


@pytest.mark.parametrize("wanted", ["rows", "weight"])
def test_a_single_gradient_can_be_asked_for(wanted: str, generator: torch.Generator) -> None:
    rows, weight, counts = _inputs("uneven", "contiguous", torch.float32, generator)
    leaf = (rows if wanted == "rows" else weight).requires_grad_()
    out = torch_grouped_mm(rows, weight, counts)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    (looped,) = torch.autograd.grad(loop_grouped_mm(rows, weight, counts).square().sum(), leaf)
    torch.testing.assert_close(gradient, looped)


@pytest.mark.parametrize(
    ("dtype", "widths", "reason"),
    [
        (torch.float64, (8, 16), "no torch.float64 kernel"),
        (torch.float32, (8, 6), "multiples of 4 in torch.float32, not 6"),
        (torch.bfloat16, (8, 12), "multiples of 8 in torch.bfloat16, not 12"),
        (torch.float16, (4, 8), "multiples of 8 in torch.float16, not 4"),
    ],
)
def test_refusal_says_which_type_or_width(
    dtype: torch.dtype, widths: tuple[int, ...], reason: str
) -> None:
    assert reason in str(torch_grouped_mm_refusal(dtype, widths))


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [(torch.float32, (4, 12)), (torch.bfloat16, (8, 24)), (torch.float16, (16,))],
)
def test_fitting_types_and_widths_are_not_refused(
    dtype: torch.dtype, widths: tuple[int, ...]
) -> None:
    assert torch_grouped_mm_refusal(dtype, widths) is None


# torch 2.13 warns of what its own tracer does.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@LAYOUTS
def test_a_compiled_graph_holds_the_matmul_whole_in_every_type(
    layout: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tracer can't follow the shape checker.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    rows, weight, counts = _inputs("uneven", layout, dtype, generator)
    leaves = rows.requires_grad_(), weight.detach().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(torch_grouped_mm, backend="aot_eager", fullgraph=True, dynamic=True)(
        *leaves, counts
    )
    looped = loop_grouped_mm(*leaves, counts)
    torch.testing.assert_close(compiled, looped)
    upstream = torch.randn(looped.shape, generator=generator).to(dtype)
    for ours, theirs in zip(
        torch.autograd.grad(compiled, leaves, upstream),
        torch.autograd.grad(looped, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("counts", [[2, 1], [2, 5], [8, -3]])
@pytest.mark.parametrize("grouped_mm", [torch_grouped_mm, loop_grouped_mm])
def test_counts_that_do_not_add_up_to_the_rows_are_refused(
    counts: list[int], grouped_mm: GroupedMatmul
) -> None:
    with pytest.raises(RuntimeError, match=r"counts_G must be the rows|split_with_sizes expects"):
        grouped_mm(torch.ones(5, 4), torch.ones(2, 4, 4), torch.tensor(counts))
