"""A whole OLMoE model, built by transformers with random weights, equals ours."""

from types import ModuleType

import torch


def test_logits_and_every_gradient_equal_olmoe(hf: ModuleType, generator: torch.Generator) -> None:
    theirs, ours = hf.tiny_olmoe(generator)
    ids = torch.randint(53, (2, 11), generator=generator)
    gradient = torch.randn(2, 11, 53, generator=generator)

    our_logits, records = ours(ids)
    their_logits = theirs(ids, use_cache=False).logits
    our_logits.backward(gradient)
    their_logits.backward(gradient)

    assert len(records) == 2
    torch.testing.assert_close(our_logits, their_logits)
    expected = hf.our_state({name: value.grad for name, value in theirs.named_parameters()})
    actual = {name: value.grad for name, value in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        # Sums over 22 tokens and two layers; relative to the largest entry.
        torch.testing.assert_close(
            grad,
            expected[name],
            rtol=1.3e-6,
            atol=1e-5 * float(expected[name].abs().max()),
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )
