"""Which kernel attention takes on CUDA, and what it allocates."""

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import sdpa_attention
from lightning_moe.ops.attention import AttentionMask, attention_mask
from tests.cuda.table import row

MIB = 2**20
DEVICES = [torch.device("cuda", i) for i in (0, 2, 3, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _inputs(
    device: torch.device, dtype: torch.dtype, length: int, kv_heads: int, head_dim: int = 64
) -> list[Tensor]:
    return [
        torch.empty(1, heads, length, head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (16, kv_heads, kv_heads)
    ]


def _mask(kind: str, length: int, device: torch.device) -> AttentionMask:
    documents = torch.zeros(1, length, dtype=torch.int64, device=device)
    return attention_mask(
        length,
        window=length // 8 if kind == "window" else None,
        document_ids_BS=documents if kind == "documents" else None,
        device=device,
    )


def _kernel(y: Tensor) -> str:
    """The name of the attention's node in the graph of autograd."""
    names, node = [], y.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    return next((name for name in names if "Attention" in name), f"math: {names[:4]}")


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("kv_heads", [16, 4, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_mask_no_type_and_no_heads_take_the_path_that_stores_all_scores(
    dtype: torch.dtype, kv_heads: int, kind: str, device: torch.device
) -> None:
    y = sdpa_attention(*_inputs(device, dtype, 512, kv_heads), _mask(kind, 512, device))
    wanted = "Flash" if kind == "causal" and dtype != torch.float32 else "Efficient"
    assert wanted in _kernel(y)


def _peak(kind: str, kv_heads: int, length: int) -> float:
    """MiB that forward and backward of one layer allocate, its mask and inputs not counted."""
    device = DEVICES[0]
    qkv = _inputs(device, torch.bfloat16, length, kv_heads, head_dim=128)
    mask = _mask(kind, length, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = sdpa_attention(*qkv, mask)
    y.backward(torch.empty_like(y))
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def test_a_mask_over_grouped_heads_allocates_little_more_than_over_equal_ones() -> None:
    length = 8192
    found = {
        (kind, kv_heads): _peak(kind, kv_heads, length)
        for kind in ("causal", "documents")
        for kv_heads in (16, 4)
    }
    for (kind, kv_heads), mib in found.items():
        row(f"attention, {kind}, {kv_heads} of 16 heads", {}, f"{mib:.0f} MiB at most, S={length}")
    # All scores in bfloat16 are 2,048 MiB, and the path that stores them holds several such.
    assert found["documents", 4] < found["documents", 16] + 256


def test_making_a_mask_holds_three_bytes_per_pair_of_positions_at_most() -> None:
    length, device = 8192, DEVICES[0]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    mask = attention_mask(
        length,
        window=1024,
        document_ids_BS=torch.zeros(1, length, dtype=torch.int64, device=device),
        device=device,
    )
    peak = (torch.cuda.max_memory_allocated(device) - before) / MIB
    assert mask.allowed_BHSS is not None
    row("mask of 8,192 positions", {}, f"{peak:.0f} MiB while it is made, 64 kept")
    assert peak < 3 * 64 + 2
