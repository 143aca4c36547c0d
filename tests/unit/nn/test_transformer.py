"""The whole transformer against the reference, and what it keeps through copies and casts."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.config import (
    AttentionConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoETransformer, balance_loss
from lightning_moe.nn.router_losses import router_losses
from tests.kit import reference, reference_model
from tests.kit.randomized import randomized

MOE = MoEConfig(
    num_experts=3,
    hidden_size=5,
    router=RouterConfig(top_k=2, bias_gamma=1e-3, lb_loss_weight=0.1, z_loss_weight=0.1),
    shared=SharedExpertConfig(hidden_size=3),
)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 2]])


def _config(**options: Any) -> TransformerConfig:
    sizes = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "moe": MOE}
    attention = AttentionConfig(num_heads=2, rope_theta=50.0)
    return TransformerConfig(**{**sizes, "attention": attention, **options})


def _model(config: TransformerConfig, generator: torch.Generator) -> MoETransformer:
    return randomized(MoETransformer(config), generator, std=0.5).double()


def _ids(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(11, shape or (2, 5), generator=generator)


def _heads(**options: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 2, "rope_theta": 50.0, **options})


VARIANTS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "peri": {"norm_placement": "peri", "norm_eps": 0.1},
    "norm of each head": {"attention": _heads(qk_norm="head", num_kv_heads=1)},
    "norm of all heads": {"attention": _heads(qk_norm="full", num_kv_heads=1)},
    "grouped heads": {"attention": _heads(num_heads=4, num_kv_heads=2, head_dim=6)},
    "biases": {"attention": _heads(bias=True)},
    "no positions": {"attention": _heads(rope_theta=None, num_heads=8)},
    "window": {"attention": _heads(sliding_window=2)},
    "window pattern": {"window_pattern": (2, None, 3), "num_layers": 3},
    "tied": {"tie_embeddings": True},
    "scaled embedding": {"scale_embedding": True},
    "normed embedding": {"scale_embedding": True, "norm_embedding": True, "norm_eps": 0.1},
    "dense first": {"num_dense_layers": 1, "dense_hidden_size": 7},
    "dense only": {"moe": None, "dense_hidden_size": 7},
    "override": {
        "layer_overrides": {
            1: LayerConfig(
                attention=_heads(num_heads=1, head_dim=4, rope_theta=7.0, sliding_window=3),
                moe=MoEConfig(num_experts=2, hidden_size=4, activation="relu2"),
            )
        }
    },
}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_the_reference(
    variant: str, documents: Tensor | None, generator: torch.Generator
) -> None:
    model, ids = _model(_config(**VARIANTS[variant]), generator), _ids(generator)
    with torch.no_grad():
        expected, routed = reference_model.transformer(
            ids, model.state_dict(), model.config, documents=documents
        )
        logits, records = model(ids, document_ids_BS=documents)
    torch.testing.assert_close(logits, expected)
    assert len(records) == len(routed[0])
    for number, record in enumerate(records):
        chosen = torch.cat([decisions[number].ids for decisions in routed])
        assert record.requested_E.tolist() == reference.count(chosen, len(record.requested_E))


@pytest.mark.parametrize("variant", ["peri", "tied", "norm of each head"])
def test_every_gradient_equals_the_reference(variant: str, generator: torch.Generator) -> None:
    model, ids = _model(_config(**VARIANTS[variant]), generator), _ids(generator, 1, 4)
    names, leaves = zip(*model.named_parameters(), strict=True)
    logits, records = model(ids)
    weights = {**model.state_dict(), **dict(model.named_parameters())}
    expected, routed = reference_model.transformer(ids, weights, model.config)
    labels = torch.tensor([3, -100, 10, 0])
    ours = torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum")
    ours = ours + balance_loss(records)
    wanted = reference.cross_entropy(expected[0], labels)
    wanted = wanted + sum(reference.balance_loss(layer.ids, layer.shares) for layer in routed[0])
    gradients = torch.autograd.grad(ours, leaves)
    expected_gradients = torch.autograd.grad(wanted, leaves, materialize_grads=True)
    for name, got, want in zip(names, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_documents_in_one_sequence_equal_documents_apart(generator: torch.Generator) -> None:
    # Positions go on over a border, but rotary attention only sees distances.
    model, ids = _model(_config(), generator), _ids(generator, 1, 7)
    documents = torch.tensor([[0, 0, 0, 5, 5, 1, 1]])
    together = model(ids, document_ids_BS=documents)[0]
    apart = torch.cat([model(part)[0] for part in ids.split([3, 2, 2], dim=1)], dim=1)
    torch.testing.assert_close(together, apart)


def test_later_tokens_do_not_change_earlier_logits(generator: torch.Generator) -> None:
    model, ids = _model(_config(), generator), _ids(generator)
    changed = ids.clone()
    changed[:, 3:] = (ids[:, 3:] + 1) % 11
    before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert (after[:, 3:] - before[:, 3:]).abs().max() > 1e-3


def test_valid_tokens_alone_are_recorded(generator: torch.Generator) -> None:
    model, ids = _model(_config(), generator), _ids(generator)
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    logits, records = model(ids, valid_BS=valid)
    torch.testing.assert_close(logits, model(ids)[0])
    assert [record.num_tokens.item() for record in records] == [7, 7]
    first, second = model(ids[:1])[1], model(ids[1:, :2])[1]
    for record, left, right in zip(records, first, second, strict=True):
        assert torch.equal(record.requested_E, left.requested_E + right.requested_E)


def test_features_are_what_the_head_reads(generator: torch.Generator) -> None:
    model, ids = _model(_config(), generator), _ids(generator)
    features, records = model.features(ids)
    assert features.shape == (2, 5, 8)
    assert len(records) == 2
    torch.testing.assert_close(features @ model.head_weight.t(), model(ids)[0])


def _emptied(model: MoETransformer) -> MoETransformer:
    state = model.state_dict()
    model.to_empty(device="cpu").load_state_dict(state)
    return model


REMAKES: dict[str, Callable[[MoETransformer], MoETransformer]] = {
    "as built": lambda model: model,
    "to_empty": _emptied,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "cast": lambda model: model.float().double(),
}


@pytest.mark.parametrize("remake", REMAKES)
def test_tied_head_is_one_parameter_with_the_sum_of_both_gradients(
    remake: str, generator: torch.Generator
) -> None:
    tied = REMAKES[remake](_model(_config(tie_embeddings=True), generator))
    assert tied.head_weight is tied.embedding.weight
    assert not [name for name in tied.state_dict() if name.startswith("head")]
    untied = MoETransformer(_config()).double()
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    ids = _ids(generator)
    for model in (tied, untied):
        model(ids)[0].logsumexp(dim=-1).sum().backward()
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected)


@pytest.mark.parametrize("remake", ["deepcopy", "pickle"])
def test_copies_give_the_same_logits_exactly(remake: str, generator: torch.Generator) -> None:
    config = _config(
        layer_overrides={0: LayerConfig(dense_hidden_size=4)}, window_pattern=(2, None)
    )
    model, ids = _model(config, generator), _ids(generator)
    twin = REMAKES[remake](model)
    assert torch.equal(twin(ids)[0], model(ids)[0])
    assert twin.config == model.config


def test_state_dict_round_trip_is_exact(generator: torch.Generator) -> None:
    source, target = _model(_config(), generator), _model(_config(), generator)
    ids = _ids(generator)
    assert not torch.equal(target(ids)[0], source(ids)[0])
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(ids)[0], source(ids)[0])


@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
@pytest.mark.parametrize("kind", ["bf16 module", "autocast"])
def test_low_precision_stays_close_and_finite(
    placement: str, kind: str, generator: torch.Generator
) -> None:
    attention = _heads(qk_norm="head")
    config = _config(norm_placement=placement, norm_embedding=True, attention=attention)
    model = randomized(MoETransformer(config), generator, std=0.3)
    ids = _ids(generator)
    expected = model(ids)[0]
    if kind == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, records = model(ids)
    else:
        logits, records = model.bfloat16()(ids)
    assert {record.score_sums_E.dtype for record in records} == {torch.float32}
    (logits.float().square().sum() + balance_loss(records)).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # Two layers of bf16 roundings (2^-8 each); a token near a tie may also choose another expert.
    assert (logits.float() - expected).norm() / expected.norm() < 0.1


def test_model_without_tokens_or_moe_layers_still_runs(generator: torch.Generator) -> None:
    model = _model(_config(), generator)
    logits, records = model(_ids(generator, 2, 0))
    assert logits.shape == (2, 0, 11)
    assert [record.requested_E.tolist() for record in records] == [[0, 0, 0]] * 2
    dense = _model(_config(moe=None, dense_hidden_size=3), generator)
    assert dense(_ids(generator))[1] == []


def _layers(model: MoETransformer) -> list[Any]:
    return [block.feed_forward for block in model.blocks]


def test_router_losses_are_weighted_and_added_up_over_layers(generator: torch.Generator) -> None:
    first = RouterConfig(lb_loss_weight=0.5, z_loss_weight=0.25)
    second = RouterConfig(lb_loss_scope="sequence", lb_loss_weight=2.0, orth_loss_weight=3.0)
    moes = [MoEConfig(num_experts=3, hidden_size=5, router=router) for router in (first, second)]
    overrides = {index: LayerConfig(moe=moe) for index, moe in enumerate(moes)}
    model, ids = _model(_config(layer_overrides=overrides), generator), _ids(generator)
    weights = {**model.state_dict(), **dict(model.named_parameters())}
    _, routed = reference_model.transformer(ids, weights, model.config)
    layers, records = _layers(model), model(ids)[1]
    losses = router_losses(layers, records)
    batch = [torch.cat([sequence[0].ids for sequence in routed])]
    batch += [
        torch.cat([getattr(sequence[0], f) for sequence in routed]) for f in ("shares", "logz")
    ]
    ids_of_layer, shares, logz = batch
    balance = [
        10 * reference.balance_loss(ids_of_layer, shares),
        sum(5 * reference.balance_loss(part[1].ids, part[1].shares) for part in routed),
    ]
    z = [(logz**2).sum(), sum((part[1].logz ** 2).sum() for part in routed)]
    orthogonality = 10 * reference.orthogonality_loss(layers[1].router.weight)
    total = 0.5 * balance[0] + 0.25 * z[0] + 2.0 * balance[1] + 3.0 * orthogonality
    torch.testing.assert_close(losses.total, total)
    torch.testing.assert_close(losses.balance, (balance[0] + balance[1]).detach() / 2)
    torch.testing.assert_close(losses.z, (z[0] + z[1]).detach() / 2)
    leaves = [layer.router.weight for layer in layers]
    for got, want in zip(
        torch.autograd.grad(losses.total, leaves), torch.autograd.grad(total, leaves), strict=True
    ):
        torch.testing.assert_close(got, want)
    assert not losses.balance.requires_grad
    assert not losses.z.requires_grad


def test_the_balance_loss_can_be_the_mean_over_layers(generator: torch.Generator) -> None:
    routers = [RouterConfig(lb_loss_weight=0.5, lb_loss_over_layers=how) for how in ("sum", "mean")]
    ids = _ids(generator)
    moes = [MoEConfig(num_experts=3, hidden_size=5, router=router) for router in routers]
    mixed = {index: LayerConfig(moe=moe) for index, moe in enumerate(moes)}
    model = _model(_config(layer_overrides=mixed), generator)
    layers, records = _layers(model), model(ids)[1]
    first, second = (balance_loss([record], reduction="sum") for record in records)
    losses = router_losses(layers, records)
    torch.testing.assert_close(losses.total, 0.5 * first + 0.5 * second / 2)
    # What is watched is a mean anyway.
    torch.testing.assert_close(losses.balance, ((first + second) / 2).detach())


def test_router_losses_of_a_frozen_router_are_values_without_gradient(
    generator: torch.Generator,
) -> None:
    model, ids = _model(_config(), generator), _ids(generator)
    expected = router_losses(_layers(model), model(ids)[1])
    for layer in _layers(model):
        layer.router.requires_grad_(False)
    losses = router_losses(_layers(model), model(ids)[1])
    torch.testing.assert_close(losses.total, expected.total.detach())
    with torch.no_grad():
        losses = router_losses(_layers(model), model(ids)[1])
    torch.testing.assert_close(losses.balance, expected.balance)


@pytest.mark.parametrize("kept", [0, 1])
def test_router_losses_need_one_record_per_layer(kept: int, generator: torch.Generator) -> None:
    model = _model(_config(), generator)
    records = model(_ids(generator))[1][:kept]
    with pytest.raises(ValueError, match=rf"{kept} routing records for 2 MoE layers"):
        router_losses(_layers(model), records)
