"""The choice of the experts' matmul."""

import pytest
import torch

from lightning_moe.config import MoEConfig
from lightning_moe.nn import Experts
from tests.unit.nn.randomized import randomized

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
