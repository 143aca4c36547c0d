"""The choice of the experts' matmul."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe.config import MoEConfig
from lightning_moe.nn import Experts
from tests.kit import reference
from tests.kit.randomized import randomized

COUNTS = torch.tensor([2, 0, 3])


def _experts(backend: str, *, width: int = 8, hidden: int = 4) -> Experts:
    config = MoEConfig(num_experts=3, hidden_size=hidden, backend=backend)
    return randomized(Experts(width, config), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "reason"),
    [
        (torch.float64, 8, 4, r"no torch\.float64 kernel"),
        (torch.float32, 6, 4, "multiples of 4 in torch.float32, not 6"),
        (torch.float32, 8, 3, "multiples of 4 in torch.float32, not"),
        (torch.float32, 8, 6, "multiples of 4 in torch.float32, not 6"),
        (torch.bfloat16, 12, 8, "multiples of 8 in torch.bfloat16, not 12"),
    ],
)
def test_torch_backend_refuses_what_it_cannot_run_and_names_the_option(
    dtype: torch.dtype, width: int, hidden: int, reason: str
) -> None:
    experts = _experts("torch", width=width, hidden=hidden).to(dtype)
    with pytest.raises(ValueError, match=rf"model\.moe\.backend=torch.*{reason}.*backend=auto"):
        experts(torch.zeros(5, width, dtype=dtype), COUNTS)


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "reason"),
    [
        (torch.float64, 8, 4, "no torch.float64 kernel"),
        (torch.float32, 5, 3, "multiples of 4 in torch.float32, not 5"),
    ],
)
def test_auto_takes_the_loop_where_torch_cannot_and_says_why(
    dtype: torch.dtype, width: int, hidden: int, reason: str
) -> None:
    auto = _experts("auto", width=width, hidden=hidden).to(dtype)
    loop = _experts("loop", width=width, hidden=hidden).to(dtype)
    rows = torch.randn(5, width, dtype=dtype)
    assert torch.equal(auto(rows, COUNTS), loop(rows, COUNTS))
    account = auto.backend.account(auto.sizes())
    assert account.startswith(f"expert backend: auto takes loop in {dtype} on cpu (not torch: ")
    assert reason in account


def test_auto_takes_torch_where_it_can() -> None:
    rows = torch.randn(5, 8)
    auto = _experts("auto")
    assert torch.equal(auto(rows, COUNTS), _experts("torch")(rows, COUNTS))
    said = "expert backend: auto takes torch in torch.float32 on cpu"
    assert auto.backend.account(auto.sizes()) == said


@pytest.mark.parametrize(
    ("backend", "dtype", "capability", "waits"),
    [
        ("auto", torch.bfloat16, (9, 0), 0),
        ("auto", torch.bfloat16, (10, 3), 0),
        ("auto", torch.bfloat16, (8, 0), 6),
        ("auto", torch.bfloat16, (12, 0), 6),
        ("auto", torch.float32, (9, 0), 6),
        ("loop", torch.bfloat16, (9, 0), 2),
        ("fp8_rowwise", torch.bfloat16, (9, 0), 0),
        ("fp8_rowwise", torch.float32, (9, 0), 2),
    ],
)
def test_a_backend_that_makes_the_host_wait_for_a_gpu_says_so(
    backend: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    experts = _experts(backend, width=16, hidden=16)
    sizes = replace(experts.sizes(dtype), device=torch.device("cuda"))
    account = experts.backend.account(sizes)
    said = f"the host waits for the device {waits} times per layer and micro-batch"
    assert (said in account) == (waits > 0)
    assert waits or "waits" not in account


def test_a_backend_whose_package_is_missing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"backend=grouped_gemm can't.*is not installed"):
        _experts("grouped_gemm")(torch.zeros(5, 8), COUNTS)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 3, 9]), min_size=1, max_size=6),
    backend=st.sampled_from(["loop", "torch"]),
    activation=st.sampled_from(["swiglu", "relu2", "gpt_oss_swiglu"]),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_backend_equals_float64_with_all_gradients(
    counts: list[int], backend: str, activation: str, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = MoEConfig(
        num_experts=len(counts),
        hidden_size=4,
        backend=backend,
        activation=activation,
        expert_bias=bias,
    )
    experts = randomized(Experts(8, config), generator)
    rows = torch.randn(sum(counts), 8, generator=generator, requires_grad=True)
    upstream = torch.randn(sum(counts), 8, generator=generator)
    out = experts(rows, torch.tensor(counts))
    leaves = [rows, *experts.parameters()]
    ours = [out, *torch.autograd.grad(out, leaves, upstream)]
    names = [f"experts.{name}" for name, _ in experts.named_parameters()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weights = dict(zip(names, exact[1:], strict=True))
    of_row = [e for e, count in enumerate(counts) for _ in range(count)]
    tokens = [
        reference.expert(row, weights, e, config) for row, e in zip(exact[0], of_row, strict=True)
    ]
    wanted = torch.stack(tokens) if tokens else exact[0] * 1
    gradients = torch.autograd.grad(wanted, exact, upstream.double(), materialize_grads=True)
    for got, want in zip(ours, [wanted, *gradients], strict=True):
        # Products of a few numbers near 1, in float32.
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


def test_autocast_decides_the_type_of_the_matmuls() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _experts("auto")(torch.zeros(5, 8), COUNTS).dtype == torch.bfloat16


def test_rows_meet_the_experts_in_order() -> None:
    # relu2 of a 1 x 1 expert: w_down * (w_up * x)^2.
    experts = Experts(1, MoEConfig(num_experts=3, hidden_size=1, activation="relu2"))
    with torch.no_grad():
        experts.w_up_gate.copy_(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))
        experts.w_down.copy_(torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1))
    out = experts(torch.full((4, 1), 2.0), torch.tensor([1, 1, 2]))
    assert out.flatten().tolist() == [4.0, 160.0, 3600.0, 3600.0]


def test_bias_belongs_to_the_expert_of_its_row() -> None:
    config = MoEConfig(num_experts=3, hidden_size=1, activation="relu2", expert_bias=True)
    experts = Experts(1, config)
    with torch.no_grad():
        experts.w_up_gate.zero_()
        experts.w_down.fill_(1.0)
        experts.b_up_gate.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        experts.b_down.copy_(torch.tensor([[0.5], [0.25], [0.125]]))
    out = experts(torch.ones(3, 1), torch.tensor([2, 0, 1]))
    assert out.flatten().tolist() == [1.5, 1.5, 9.125]
    out.sum().backward()
    assert experts.b_down.grad.flatten().tolist() == [2.0, 0.0, 1.0]


def test_printed_sizes_name_experts_and_widths() -> None:
    assert "experts=3, width=8, hidden=4, activation=swiglu" in repr(_experts("auto"))


def test_kept_experts_are_the_named_ones_exactly() -> None:
    config = MoEConfig(num_experts=4, hidden_size=4, expert_bias=True)
    experts = randomized(Experts(8, config), torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in experts.state_dict().items()}
    experts.b_down.requires_grad_(False)
    experts.keep_(range(1, 4))
    experts.keep_(range(2, 4))
    assert experts.expert_ids == range(2, 4)
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter, before[name][2:])
        assert parameter.requires_grad is (name != "b_down")
        # The memory of the others is given back.
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_keeping_all_experts_keeps_the_parameters_themselves() -> None:
    experts = _experts("auto")
    weight = experts.w_down
    experts.keep_(range(3))
    assert experts.w_down is weight


def test_experts_that_live_elsewhere_cannot_be_kept() -> None:
    experts = _experts("auto")
    experts.keep_(range(1))
    with pytest.raises(ValueError, match=r"range\(1, 3\) are not among range\(0, 1\)"):
        experts.keep_(range(1, 3))
