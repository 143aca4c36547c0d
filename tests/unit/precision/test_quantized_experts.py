"""Experts in eight bits, emulated: against float64 arithmetic on what their codes stand for."""

from dataclasses import replace

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe.config import FP8Config, MoEConfig
from lightning_moe.nn import Experts, MoE
from lightning_moe.nn.recompute import recomputed
from lightning_moe.ops.expert_backend import ExpertSizes
from lightning_moe.precision import (
    dequantize,
    mxfp8_backend,
    quantize_mxfp8,
    quantize_rowwise,
    rowwise_backend,
)
from tests.kit.eight_bits import (
    BACKENDS,
    EMULATED,
    HIDDEN,
    WIDTH,
    eight_bit_experts,
    outputs_and_gradients,
)
from tests.kit.randomized import randomized

QUANTIZE = {"mxfp8": quantize_mxfp8, "fp8_rowwise": quantize_rowwise}


def _twin(experts: Experts, backend: str) -> Experts:
    """The same weights on another backend."""
    config = replace(experts.config, backend=backend, fp8=FP8Config())
    twin = Experts(WIDTH, config)
    twin.load_state_dict(experts.state_dict())
    return twin


def _reference(
    experts: Experts, rows: Tensor, counts: list[int], upstream: Tensor, backend: str
) -> list[Tensor]:
    """The same in float64, one expert at a time; every quantization passes its gradient straight through."""

    def rounded(values: Tensor) -> Tensor:
        return dequantize(QUANTIZE[backend](values.float().contiguous())).double()

    w_up_gate, w_down = experts.w_up_gate.detach(), experts.w_down.detach()
    results: list[list[Tensor]] = [[], [], [], []]
    for e, (x, g) in enumerate(zip(rows.split(counts), upstream.split(counts), strict=True)):
        packed = (rounded(x) @ rounded(w_up_gate[e]).t()).requires_grad_()
        up, gate = packed.chunk(2, dim=-1)
        activated = up * gate / (1 + torch.exp(-gate))
        hidden = rounded(activated.detach())
        grad_hidden = rounded(g) @ rounded(w_down[e]).t()
        (grad_packed,) = torch.autograd.grad(activated, packed, grad_hidden)
        results[0].append(hidden @ rounded(w_down[e].t()).t())
        results[1].append(rounded(grad_packed) @ rounded(w_up_gate[e].t()).t())
        results[2].append(grad_packed.t() @ rounded(x))
        results[3].append(hidden.t() @ g.double())
    join = (torch.cat, torch.cat, torch.stack, torch.stack)
    return [j(parts).detach() for j, parts in zip(join, results, strict=True)]


@BACKENDS
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 1], [7]])
def test_outputs_and_gradients_are_products_of_rounded_values(
    backend: str, counts: list[int], generator: torch.Generator
) -> None:
    experts = eight_bit_experts(backend, len(counts))
    rows = torch.randn(sum(counts), WIDTH, generator=generator)
    upstream = torch.randn(sum(counts), WIDTH, generator=generator)
    ours = outputs_and_gradients(experts, rows, counts, upstream)
    for got, wanted in zip(ours, _reference(experts, rows, counts, upstream, backend), strict=True):
        # float32 sums: 1e-5 of values near 1.
        torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 31, 32, 33, 44]), min_size=1, max_size=5),
    backend=st.sampled_from(["mxfp8", "fp8_rowwise"]),
    seed=st.integers(0, 100),
)
def test_eight_bits_stay_near_float64(counts: list[int], backend: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = eight_bit_experts(backend, len(counts), seed=seed)
    rows = torch.randn(sum(counts), WIDTH, generator=generator)
    upstream = torch.randn(sum(counts), WIDTH, generator=generator)
    ours = outputs_and_gradients(experts, rows, counts, upstream)
    exact = outputs_and_gradients(
        _twin(experts, "loop").double(), rows.double(), counts, upstream.double()
    )
    for got, wanted in zip(ours, exact, strict=True):
        error = (got.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)
        # A code is off by 2.6 % in the mean square; up to nine roundings meet in a result, and add up in squares.
        assert error < 0.2


@BACKENDS
def test_each_expert_is_as_if_alone_exactly(backend: str, generator: torch.Generator) -> None:
    counts = [44, 0, 1, 31, 32, 33]
    experts = eight_bit_experts(backend, len(counts))
    rows = torch.randn(sum(counts), WIDTH, generator=generator)
    rows[44] = 1e4
    upstream = torch.randn(sum(counts), WIDTH, generator=generator)
    together = outputs_and_gradients(experts, rows, counts, upstream)
    for e, (own_rows, own_upstream) in enumerate(
        zip(rows.split(counts), upstream.split(counts), strict=True)
    ):
        alone = [len(own_rows) if other == e else 0 for other in range(len(counts))]
        got = outputs_and_gradients(experts, own_rows, alone, own_upstream)
        assert torch.equal(got[2][e], together[2][e])
        assert torch.equal(got[3][e], together[3][e])
        if not len(own_rows):
            assert not together[2][e].any()
            assert not together[3][e].any()


@BACKENDS
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-10, 1e10])
def test_tiny_and_huge_inputs_give_finite_results(
    backend: str, size: float, generator: torch.Generator
) -> None:
    experts = eight_bit_experts(backend, 2)
    rows = torch.randn(5, WIDTH, generator=generator)
    rows[2, 3] *= size
    rows[3] *= size
    rows[4] = 0.0
    out = outputs_and_gradients(experts, rows, [2, 3], torch.ones(5, WIDTH))
    assert all(tensor.isfinite().all() for tensor in out)
    assert not out[0][4].any()


@BACKENDS
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_row_spoils_no_other_row(
    backend: str, bad: float, generator: torch.Generator
) -> None:
    experts = eight_bit_experts(backend, 2)
    rows = torch.randn(5, WIDTH, generator=generator)
    clean = outputs_and_gradients(experts, rows, [3, 2], torch.ones(5, WIDTH))
    rows[1, 40] = bad
    out = outputs_and_gradients(experts, rows, [3, 2], torch.ones(5, WIDTH))
    others = [0, 2, 3, 4]
    assert not out[0][1].isfinite().all()
    assert torch.equal(out[0][others], clean[0][others])
    assert torch.equal(out[1][others], clean[1][others])
    assert torch.equal(out[3][1], clean[3][1])


@BACKENDS
def test_rows_in_bfloat16_and_weights_in_float32_train_together(
    backend: str, generator: torch.Generator
) -> None:
    experts = eight_bit_experts(backend, 2)
    rows = torch.randn(5, WIDTH, generator=generator)
    upstream = torch.randn(5, WIDTH, generator=generator)
    wide = outputs_and_gradients(experts, rows, [2, 3], upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(rows, torch.tensor([2, 3]))
    out.backward(upstream.bfloat16())
    assert out.dtype == torch.bfloat16
    assert experts.w_down.grad.dtype == torch.float32
    for got, wanted in ((out, wide[0]), (experts.w_down.grad, wide[3])):
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()


@BACKENDS
def test_only_the_wanted_gradients_are_computed(backend: str) -> None:
    experts = eight_bit_experts(backend, 2)
    experts.w_up_gate.requires_grad_(False)
    rows = torch.ones(3, WIDTH)
    experts(rows, torch.tensor([1, 2])).sum().backward()
    assert experts.w_up_gate.grad is None
    assert experts.w_down.grad.any()


def _sizes(**changes: object) -> ExpertSizes:
    sizes = ExpertSizes(
        dtype=torch.float32,
        device=torch.device("cpu"),
        width=64,
        hidden=32,
        packed=64,
        activation="swiglu",
        bias=False,
    )
    return replace(sizes, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "relu2"}, "swiglu only, not model.moe.activation=relu2"),
        ({"bias": True}, "no biases; set model.moe.expert_bias=false"),
        ({"dtype": torch.float64}, "float32 or bfloat16, not in torch.float64"),
        ({"dtype": torch.float16}, "float32 or bfloat16, not in torch.float16"),
        ({"width": 40}, "multiple of 32, not 40 (model.d_model"),
        ({"hidden": 16}, "model.moe.hidden_size to be a multiple of 32, not 16"),
    ],
)
def test_refusal_says_what_mxfp8_cannot_run(changes: dict[str, object], reason: str) -> None:
    backend = mxfp8_backend(EMULATED)
    assert backend.refusal(_sizes()) is None
    assert reason in str(backend.refusal(_sizes(**changes)))


@pytest.mark.parametrize(
    ("make", "capability"), [(mxfp8_backend, "10.0"), (rowwise_backend, "9.0")]
)
def test_a_cpu_is_refused_unless_emulation_is_asked_for(make: object, capability: str) -> None:
    refusal = str(make(FP8Config()).refusal(_sizes()))
    assert "the device is cpu" in refusal
    assert f"compute capability {capability} or more and below 11.0" in refusal
    assert "model.moe.fp8.emulate=true" in refusal
    assert make(EMULATED).refusal(_sizes()) is None
    assert "emulated" in make(EMULATED).note


# torch's scaled grouped matmul refuses all but 9.x and 10.x at its first call: consumer Blackwell is 12.0.
@pytest.mark.parametrize(
    ("capability", "rowwise", "mxfp8"),
    [
        ((8, 9), False, False),
        ((9, 0), True, False),
        ((10, 0), True, True),
        ((10, 3), True, True),
        ((11, 0), False, False),
        ((12, 0), False, False),
    ],
)
def test_the_device_decides_by_its_capability(
    capability: tuple[int, int], rowwise: bool, mxfp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for make, runs in ((rowwise_backend, rowwise), (mxfp8_backend, mxfp8)):
        refusal = make(FP8Config()).refusal(_sizes(device=torch.device("cuda")))
        assert (refusal is None) == runs
        assert runs or f"the device has {capability[0]}.{capability[1]}" in str(refusal)


def test_experts_refuse_before_any_arithmetic_and_name_the_option() -> None:
    experts = eight_bit_experts("mxfp8", 2, fp8=FP8Config())
    with pytest.raises(ValueError, match=r"model\.moe\.backend=mxfp8 can't.*the device is cpu"):
        experts(torch.ones(3, WIDTH), torch.tensor([1, 2]))


@BACKENDS
def test_recomputation_changes_nothing_exactly(backend: str, generator: torch.Generator) -> None:
    experts = eight_bit_experts(backend, 2)
    rows = torch.randn(5, WIDTH, generator=generator, requires_grad=True)
    counts = torch.tensor([2, 3])
    leaves = [rows, *experts.parameters()]
    plain = torch.autograd.grad(experts(rows, counts).square().sum(), leaves)
    again = torch.autograd.grad(recomputed(experts, rows, counts).square().sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


# torch 2.13 warns of what its own tracer does.
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_goes_around_eight_bits(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tracer can't follow the shape checker.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    config = MoEConfig(num_experts=3, hidden_size=HIDDEN, backend="mxfp8", fp8=EMULATED)
    layer = randomized(MoE(WIDTH, config), generator)
    x = torch.randn(5, WIDTH, generator=generator, requires_grad=True)
    (eager,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    torch._dynamo.reset()
    layer.compile(backend="aot_eager")
    (compiled,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    torch.testing.assert_close(compiled, eager)


@BACKENDS
def test_codes_of_weights_are_not_saved_as_activations(
    backend: str, generator: torch.Generator
) -> None:
    experts = eight_bit_experts(backend, 2)
    rows = torch.randn(6, WIDTH, generator=generator, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor.numel()), tensor)[1], lambda tensor: tensor
    ):
        out = experts(rows, torch.tensor([4, 2]))
    # Counts, [up; gate], and codes and scales of the rows: offloading, say, moves nothing else.
    per_row = WIDTH // 32 if backend == "mxfp8" else 1
    assert sorted(saved) == sorted([2, 6 * 2 * HIDDEN, 6 * WIDTH, 6 * per_row])
    out.sum().backward()


def test_a_weight_changed_before_backward_does_not_change_its_gradients() -> None:
    experts = eight_bit_experts("mxfp8", 2)
    rows = torch.ones(3, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(experts(rows, torch.tensor([1, 2])).sum(), rows)
    out = experts(rows, torch.tensor([1, 2]))
    experts.w_down.data.zero_()
    (got,) = torch.autograd.grad(out.sum(), rows)
    assert torch.equal(got, wanted)


@BACKENDS
def test_a_weight_may_change_before_backward_which_has_the_codes(
    backend: str, generator: torch.Generator
) -> None:
    rows = torch.randn(6, WIDTH, generator=generator)
    upstream = torch.randn(6, WIDTH, generator=generator)
    counts = [4, 2]
    expected = outputs_and_gradients(eight_bit_experts(backend, 2), rows, counts, upstream)
    experts = eight_bit_experts(backend, 2)
    out = experts(leaf := rows.clone().requires_grad_(), torch.tensor(counts))
    with torch.no_grad():
        experts.w_up_gate.mul_(2)
        experts.w_down.mul_(2)
    leaves = [leaf, experts.w_up_gate, experts.w_down]
    for got, gradient in zip(torch.autograd.grad(out, leaves, upstream), expected[1:], strict=True):
        assert torch.equal(got, gradient)
