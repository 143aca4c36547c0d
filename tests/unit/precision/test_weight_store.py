"""The codes of a weight: made once per optimizer step, anew after any change, and nobody else's."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lightning_moe.nn import Experts
from lightning_moe.precision import Quantized, WeightStore, dequantize, quantize_mxfp8
from tests.kit.eight_bits import WIDTH, eight_bit_experts


class _Counted:
    """A quantizer that counts its calls on weights."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, values: Tensor) -> Quantized:
        """Quantize and count."""
        self.calls += values.dim() == 3
        return quantize_mxfp8(values)


@pytest.fixture
def counted() -> tuple[Experts, _Counted]:
    experts, count = eight_bit_experts("mxfp8", 2), _Counted()
    store = experts.backend.settle(experts.sizes()).down
    store._quantize = count
    return experts, count


def _forward(experts: Experts) -> Tensor:
    return experts(torch.ones(3, WIDTH), torch.tensor([1, 2]))


def _plain(experts: Experts) -> Tensor:
    """What a store made just now would give."""
    fresh = eight_bit_experts("mxfp8", 2)
    fresh.load_state_dict(experts.state_dict())
    return _forward(fresh)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_weights_are_quantized_once_per_optimizer_step(
    kind: type[torch.optim.Optimizer],
    options: dict[str, bool],
    counted: tuple[Experts, _Counted],
) -> None:
    experts, count = counted
    optimizer = kind(experts.parameters(), lr=0.1, **options)
    for _ in range(3):
        for _ in range(4):
            out = _forward(experts)
            assert torch.equal(out, _plain(experts))
            out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert count.calls == 2 * 3


@torch.no_grad()
def _changed_in_place(experts: Experts) -> None:
    experts.w_down.mul_(2)


def _loaded(experts: Experts) -> None:
    experts.load_state_dict({name: 2 * value for name, value in experts.state_dict().items()})


def _assigned(experts: Experts) -> None:
    state = {name: 2 * value for name, value in experts.state_dict().items()}
    experts.load_state_dict(state, assign=True)


def _cast(experts: Experts) -> None:
    experts.to(torch.bfloat16).to(torch.float32)


def _swapped_for_evaluation(experts: Experts) -> None:
    experts.w_down.data.copy_(2 * experts.w_down.data)
    experts.eval()


def _kept(experts: Experts) -> None:
    experts.w_down.data = experts.w_down.data * 3


@pytest.mark.parametrize(
    "change", [_changed_in_place, _loaded, _assigned, _cast, _swapped_for_evaluation, _kept]
)
def test_changed_weights_are_quantized_anew(
    change: object, counted: tuple[Experts, _Counted]
) -> None:
    experts, count = counted
    _forward(experts)
    before = count.calls
    change(experts)
    assert torch.equal(_forward(experts), _plain(experts))
    assert count.calls == before + 2


def test_another_tensor_in_the_same_memory_is_quantized_anew() -> None:
    store, weight = WeightStore(quantize_mxfp8), torch.ones(2, 32, 32)
    store.layouts(weight)
    weight.data.mul_(2)
    successor = weight.data
    assert (successor.data_ptr(), successor._version) == (weight.data_ptr(), weight._version)
    assert dequantize(store.layouts(successor)[0])[0, 0, 0].item() == 2.0


def test_each_evaluation_looks_at_the_weights_again() -> None:
    experts = eight_bit_experts("mxfp8", 2).eval()
    first = _forward(experts)
    experts.w_down.data.mul_(2)
    experts.eval()
    assert not torch.equal(_forward(experts), first)
    assert torch.equal(_forward(experts), _plain(experts))


def test_weights_swapped_back_after_evaluation_are_quantized_anew() -> None:
    experts = eight_bit_experts("mxfp8", 2)
    wanted, own = _forward(experts), experts.w_down.detach().clone()
    experts.eval()
    experts.w_down.data.copy_(2 * own)
    assert not torch.equal(_forward(experts), wanted)
    experts.w_down.data.copy_(own)
    # As Lightning does after validation, going around `train`.
    experts.training = True
    assert torch.equal(_forward(experts), wanted)


def test_what_validation_has_quantized_serves_training() -> None:
    experts = eight_bit_experts("mxfp8", 2)
    with torch.inference_mode():
        _forward(experts)
    _forward(experts).sum().backward()
    assert experts.w_down.grad.any()


def test_weights_made_in_inference_mode_are_quantized_each_time() -> None:
    with torch.inference_mode():
        experts = eight_bit_experts("mxfp8", 2)
        first = _forward(experts)
        experts.w_down.mul_(2)
        assert not torch.equal(_forward(experts), first)


def test_stores_take_2_06_bytes_per_weight_and_no_place_in_a_checkpoint() -> None:
    experts = eight_bit_experts("mxfp8", 3)
    names = set(experts.state_dict())
    backend = experts.backend.settle(experts.sizes())
    assert backend.up_gate.nbytes == backend.down.nbytes == 0
    experts(torch.ones(3, WIDTH), torch.tensor([1, 2, 0]))
    weights = sum(parameter.numel() for parameter in experts.parameters())
    assert backend.up_gate.nbytes + backend.down.nbytes == 2 * 33 / 32 * weights
    assert set(experts.state_dict()) == names == {"w_up_gate", "w_down"}
    assert len(pickle.dumps(experts)) < 4.5 * weights


def test_copies_have_stores_of_their_own() -> None:
    experts = eight_bit_experts("mxfp8", 2)
    out = _forward(experts)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(_forward(twin), out)
        with torch.no_grad():
            twin.w_down.zero_()
        assert not _forward(twin).any()
        assert torch.equal(_forward(experts), out)
