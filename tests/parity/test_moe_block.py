"""Our layer equals the mixture-of-experts blocks of transformers: output and every gradient."""

from types import ModuleType

import pytest
import torch

FIELDS = ("router", "gate", "up", "down")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 3), (5, 1), (4, 4), (32, 2)], ids=str)
def test_layer_equals_the_block_of_transformers(
    hf: ModuleType,
    generator: torch.Generator,
    family: str,
    implementation: str,
    num_experts: int,
    top_k: int,
) -> None:
    sizes = hf.Sizes(d_model=16, hidden_size=12, num_experts=num_experts, top_k=top_k)
    weights = hf.random_weights(sizes, generator)
    ours = hf.our_layer(family, sizes, weights)
    theirs = hf.their_layer(family, sizes, weights, implementation=implementation)
    x = torch.randn(2, 9, 16, generator=generator)
    gradient = torch.randn(2, 9, 16, generator=generator)

    our_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    our_y, routing = ours(our_x)
    their_y = theirs(their_x)
    our_y.backward(gradient)
    their_y.backward(gradient)

    assert int(routing.requested_E.sum()) == 2 * 9 * top_k
    torch.testing.assert_close(our_y, their_y)
    torch.testing.assert_close(our_x.grad, their_x.grad)
    our_grads = hf.our_tensors(ours, grad=True)
    their_grads = hf.their_tensors(theirs, grad=True)
    for field in FIELDS:
        torch.testing.assert_close(
            getattr(our_grads, field),
            getattr(their_grads, field),
            msg=lambda text, field=field: f"gradient of {field}: {text}",
        )
