"""Rows that travel as bytes: the same values and gradients as rows that experts quantize themselves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_moe.config import (
    FP8Config,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
)
from lightning_moe.nn import Dispatched, LocalDispatcher, MoE
from lightning_moe.nn.byte_rows import arrived
from lightning_moe.nn.recompute import recomputed
from lightning_moe.precision import Quantized, quantize_rowwise
from tests.kit.memory import LiveBytes
from tests.kit.randomized import randomized

WIDTH = 64
BACKENDS = pytest.mark.parametrize("backend", ["mxfp8", "fp8_rowwise"])


def _layer(backend: str, **options: object) -> MoE:
    config = MoEConfig(
        num_experts=5,
        hidden_size=32,
        router=RouterConfig(top_k=2),
        backend=backend,
        fp8=FP8Config(emulate=backend in ("mxfp8", "fp8_rowwise")),
        **options,
    )
    return randomized(MoE(WIDTH, config), torch.Generator().manual_seed(1), std=0.2)


def _sends_rows(layer: MoE) -> MoE:
    """The same layer, whose rows are quantized by the experts, one by one."""
    layer.experts.encode = lambda x_TW: x_TW
    return layer


def _step(layer: MoE, x: Tensor, *, recompute: bool = False) -> list[Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    y, _ = recomputed(layer, x) if recompute else layer(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(gradient)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@BACKENDS
@pytest.mark.parametrize("num_tokens", [9, 1, 0])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_quantizing_tokens_first_changes_no_bit_of_outputs_and_gradients(
    backend: str, num_tokens: int, dtype: torch.dtype, autocast: bool, generator: torch.Generator
) -> None:
    # Without a latent projection, which autocast would give the type of the experts before them.
    options = {"shared": SharedExpertConfig(hidden_size=5)}
    x = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = _step(_sends_rows(_layer(backend, **options).to(dtype)), x)
        for recompute in (False, True):
            found = _step(_layer(backend, **options).to(dtype), x, recompute=recompute)
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@BACKENDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_token_is_as_bad_as_before(
    backend: str, bad: float, generator: torch.Generator
) -> None:
    x = torch.randn(9, WIDTH, generator=generator)
    x[3, 40] = bad
    expected = _step(_sends_rows(_layer(backend)), x)
    found = _step(_layer(backend), x)
    assert not found[0][3].isfinite().all()
    assert found[0][[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_each_token_is_quantized_once_and_no_copy_again(generator: torch.Generator) -> None:
    layer = _layer("fp8_rowwise")
    backend = layer.experts.backend.settle(layer.experts.sizes())
    shapes: list[tuple[int, ...]] = []

    def counted(values: Tensor) -> Quantized:
        shapes.append(tuple(values.shape))
        return quantize_rowwise(values)

    backend.recipe = replace(backend.recipe, quantize=counted)
    layer(torch.randn(9, WIDTH, generator=generator))
    # Nine tokens; then, between the two matmuls, the hidden rows of their 18 copies.
    assert shapes == [(9, WIDTH), (18, 32)]


def _dispatched(x: Tensor, sent: Tensor, ids: list[list[int]]) -> Dispatched:
    """Rows at the experts, `sent` having travelled in place of `x`."""
    dispatcher, ids_TK = LocalDispatcher(), torch.tensor(ids)
    flight = dispatcher.dispatch(sent, ids_TK, torch.ones(ids_TK.shape), 3)
    return arrived(dispatcher, flight, x)


def test_the_gradient_of_a_token_is_the_sum_of_its_rows_gradients_by_hand() -> None:
    x = torch.zeros(3, 2, requires_grad=True)
    rows = torch.tensor([[10], [11], [12]], dtype=torch.uint8)
    sent = _dispatched(x, rows, [[2, 0], [0, 1], [0, 2]])
    # By expert: tokens 0, 1, 2; token 1; tokens 0, 2.
    assert sent.bytes_RZ.flatten().tolist() == [10, 11, 12, 11, 10, 12]
    gradient = torch.tensor([[1.0, 0.1], [2.0, 0.2], [4.0, 0.4], [8.0, 0.8], [16.0, 1], [32.0, 2]])
    sent.rows_RW.backward(gradient)
    torch.testing.assert_close(x.grad, torch.tensor([[17, 1.1], [10, 1.0], [36, 2.4]]))


def test_rows_beside_bytes_have_no_memory_and_are_nan() -> None:
    sent = _dispatched(torch.zeros(3, 7), torch.zeros(3, 5, dtype=torch.uint8), [[0], [1], [1]])
    assert sent.rows_RW.shape == (3, 7)
    assert sent.rows_RW.isnan().all()
    assert sent.rows_RW.untyped_storage().nbytes() == 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sent = _dispatched(torch.zeros(3, 7), sent.bytes_RZ, [[0], [1], [1]])
    # The type that experts compute in: a cast would give them memory.
    assert sent.rows_RW.dtype == torch.bfloat16
    assert sent.rows_RW.untyped_storage().nbytes() == 2


def test_rows_that_travel_as_they_are_arrive_alone() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    sent = _dispatched(x, x, [[0], [2], [1]])
    assert sent.bytes_RZ is None
    assert torch.equal(sent.rows_RW, x[[0, 2, 1]])


def test_a_recomputed_layer_keeps_no_more_in_eight_bits_than_in_float32() -> None:
    kept = {}
    for backend in ("torch", "mxfp8"):
        layer = _layer(backend)
        layer(torch.ones(1, WIDTH))  # its quantized weights are there by now
        x = torch.ones(512, WIDTH, requires_grad=True)
        with LiveBytes() as memory:
            y, record = recomputed(layer, x)
        kept[backend] = memory.live
        del y, record
    # A route would be 8 bytes per token copy.
    assert kept["mxfp8"] <= kept["torch"] + 512
