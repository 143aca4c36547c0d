"""Balance loss, z-loss and orthogonality loss."""

import math

import pytest
import torch
from torch import Tensor

from lightning_moe.ops import (
    Routing,
    balance_loss,
    load_max_over_mean,
    orthogonality_loss,
    router_z_loss,
    z_loss,
)
from tests.kit import reference


def record(
    ids: Tensor, shares: Tensor, *, logz: Tensor | None = None, num_sequences: int | None = None
) -> Routing:
    """The facts of tokens whose K experts were `ids` (T, K) and whose scores were `shares` (T, E)."""
    num_experts = shares.shape[1]
    counts = torch.tensor(reference.count(ids, num_experts))
    by_sequence = {}
    if num_sequences is not None:
        parts = ids.chunk(num_sequences)
        by_sequence = {
            "requested_BE": torch.tensor([reference.count(part, num_experts) for part in parts]),
            "score_sums_BE": torch.stack([part.sum(dim=0) for part in shares.chunk(num_sequences)]),
            "num_tokens_B": torch.tensor([len(part) for part in parts]),
        }
    return Routing(
        requested_E=counts,
        kept_E=counts,
        score_sums_E=shares.sum(dim=0),
        logz_squared=shares.new_zeros(()) if logz is None else (logz**2).sum(),
        num_tokens=torch.tensor(len(ids)),
        **by_sequence,
    )


def _random(generator: torch.Generator, *, num_tokens: int = 7) -> tuple[Tensor, Tensor]:
    """(ids (T, 2), shares (T, 5)) of a router that follows its scores."""
    logits = torch.randn(num_tokens, 5, generator=generator, dtype=torch.float64)
    return logits.topk(2).indices, logits.softmax(dim=-1).requires_grad_()


@pytest.mark.parametrize("num_experts", [1, 2, 5])
def test_perfect_balance_gives_one_per_layer(num_experts: int) -> None:
    ids = torch.arange(num_experts)[:, None]
    shares = torch.full((num_experts, num_experts), 1 / num_experts, requires_grad=True)
    layer = record(ids, shares)
    torch.testing.assert_close(balance_loss([layer]), torch.tensor(1.0))
    torch.testing.assert_close(balance_loss([layer] * 3), torch.tensor(3.0))


def test_all_tokens_on_one_certain_expert_give_e() -> None:
    shares = torch.eye(6)[[2, 2, 2]].requires_grad_()
    layer = record(torch.tensor([[2], [2], [2]]), shares)
    torch.testing.assert_close(balance_loss([layer]), torch.tensor(6.0))


def test_one_confident_expert_of_four_gives_3_97() -> None:
    # Logits (6, 0, 0, 0): 4 * e^6 / (e^6 + 3). A softmax of the softmax would give 1.89.
    shares = torch.tensor([[6.0, 0, 0, 0]] * 5, dtype=torch.float64).softmax(dim=-1)
    layer = record(torch.zeros(5, 1, dtype=torch.int64), shares.requires_grad_())
    assert balance_loss([layer]).item() == pytest.approx(3.9705, abs=5e-5)


def test_a_loss_below_one_can_hide_an_uneven_load() -> None:
    shares = torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4, dtype=torch.float64)
    layer = record(torch.tensor([[0], [0], [1], [1], [1], [1]]), shares.requires_grad_())
    assert balance_loss([layer]).item() == pytest.approx(14 / 15)
    assert load_max_over_mean(layer.requested_E).item() == pytest.approx(4 / 3)


def test_48_of_64_experts_can_be_dead_at_a_loss_of_0_0856() -> None:
    # Token t prefers expert t mod 16 by 1e-3 over all dead ones and gives nothing to the other live ones.
    p = 1 / 49
    margin = 1e-3
    shares = torch.zeros(16, 64, dtype=torch.float64)
    shares[:, 16:] = p * (1 - margin)
    shares[torch.arange(16), torch.arange(16)] = p * (1 + 48 * margin)
    layer = record(shares.argmax(dim=-1, keepdim=True), shares.requires_grad_())
    assert balance_loss([layer]).item() == pytest.approx(0.085551, abs=5e-7)
    assert load_max_over_mean(layer.requested_E).item() == 4
    assert int((layer.requested_E == 0).sum()) == 48


def test_loss_is_one_plus_e_times_the_product_of_both_deviations(
    generator: torch.Generator,
) -> None:
    ids, shares = _random(generator)
    f = torch.tensor(reference.count(ids, 5), dtype=torch.float64) / ids.numel()
    p = shares.detach().mean(dim=0)
    expected = 1 + 5 * ((f - 0.2) * (p - 0.2)).sum()
    torch.testing.assert_close(
        balance_loss([record(ids, shares)]).detach(), expected, rtol=1e-12, atol=0
    )


def test_value_and_gradient_equal_the_reference(generator: torch.Generator) -> None:
    ids, shares = _random(generator)
    ours, wanted = balance_loss([record(ids, shares)]), reference.balance_loss(ids, shares)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(loss, shares)[0] for loss in (ours, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_gradient_of_the_balance_loss(generator: torch.Generator) -> None:
    ids, shares = _random(generator)
    assert torch.autograd.gradcheck(lambda s: balance_loss([record(ids, s)]), (shares,))


def test_sum_is_the_mean_times_the_tokens(generator: torch.Generator) -> None:
    layer = record(*_random(generator))
    torch.testing.assert_close(balance_loss([layer], reduction="sum"), 7 * balance_loss([layer]))
    layer = record(*_random(generator), logz=torch.ones(7, requires_grad=True).double())
    torch.testing.assert_close(z_loss([layer], reduction="sum"), 7 * z_loss([layer]))


def test_layers_add_up(generator: torch.Generator) -> None:
    first, second = record(*_random(generator)), record(*_random(generator, num_tokens=3))
    torch.testing.assert_close(
        balance_loss([first, second]), balance_loss([first]) + balance_loss([second])
    )


def test_sequence_scope_averages_each_sequence_by_its_tokens(generator: torch.Generator) -> None:
    ids, shares = _random(generator, num_tokens=6)
    batch = record(ids, shares, num_sequences=3)
    parts = zip(ids.chunk(3), shares.chunk(3), strict=True)
    expected = sum(2 * reference.balance_loss(*part) for part in parts)
    torch.testing.assert_close(balance_loss([batch], per_sequence=True, reduction="sum"), expected)
    torch.testing.assert_close(balance_loss([batch], per_sequence=True), expected / 6)


def test_sequence_scope_does_not_depend_on_how_a_batch_is_split(generator: torch.Generator) -> None:
    ids, shares = _random(generator, num_tokens=6)
    whole = record(ids, shares, num_sequences=3)
    split = [
        record(ids[:2], shares[:2], num_sequences=1),
        record(ids[2:], shares[2:], num_sequences=2),
    ]
    losses = [
        sum(balance_loss([part], per_sequence=True, reduction="sum") for part in parts)
        for parts in ([whole], split)
    ]
    torch.testing.assert_close(*losses)
    # Not so the micro-batch scope, so this input can tell.
    local = sum(balance_loss([part], reduction="sum") for part in split)
    assert abs(local - balance_loss([whole], reduction="sum")) > 1e-3


def test_sequence_scope_needs_records_per_sequence(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=r'router\.lb_loss_scope="sequence"'):
        balance_loss([record(*_random(generator))], per_sequence=True)


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_no_tokens_cost_nothing(per_sequence: bool, reduction: str) -> None:
    shares = torch.zeros(2, 4, requires_grad=True)
    empty = record(torch.full((2, 1), -1), shares, num_sequences=2, logz=shares[:, 0])
    empty = Routing(
        requested_E=empty.requested_E,
        kept_E=empty.kept_E,
        score_sums_E=empty.score_sums_E,
        logz_squared=empty.logz_squared,
        num_tokens=torch.tensor(0),
        requested_BE=empty.requested_BE,
        score_sums_BE=empty.score_sums_BE,
        num_tokens_B=torch.zeros(2, dtype=torch.int64),
    )
    loss = balance_loss([empty], per_sequence=per_sequence, reduction=reduction)
    loss = loss + z_loss([empty], reduction=reduction)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(shares.grad).all()


def test_balance_loss_without_gradient_is_refused_where_gradients_are_on(
    generator: torch.Generator,
) -> None:
    ids, shares = _random(generator)
    layer = record(ids, shares.detach())
    with pytest.raises(
        RuntimeError, match=r"no gradient for the balance loss.*use_reentrant=False"
    ):
        balance_loss([layer])
    with torch.no_grad():
        assert balance_loss([layer]).isfinite()


def test_z_loss_without_gradient_names_the_missing_weight(generator: torch.Generator) -> None:
    layer = record(*_random(generator))
    with pytest.raises(RuntimeError, match=r"router\.z_loss_weight must be set"):
        z_loss([layer])


def test_z_loss_of_uniform_logits_is_log_e_squared_per_token() -> None:
    torch.testing.assert_close(router_z_loss(torch.zeros(5, 8)), torch.tensor(5 * math.log(8) ** 2))


def test_z_loss_of_large_logits_by_hand() -> None:
    # One logit of 200: 200^2. All four at -200: (-200 + ln 4)^2 = 39447.4.
    high, low = torch.tensor([[200.0, 0, 0, 0]] * 2), torch.full((2, 4), -200.0)
    assert router_z_loss(high).item() == 2 * 40000
    assert router_z_loss(low).item() / 2 == pytest.approx(39447.4, abs=0.05)


def test_z_loss_skips_invalid_tokens(generator: torch.Generator) -> None:
    logits = torch.randn(4, 3, generator=generator)
    logits[1] = torch.nan
    valid = torch.tensor([True, False, True, False])
    torch.testing.assert_close(router_z_loss(logits, valid), router_z_loss(logits[[0, 2]]))


def test_z_loss_of_bfloat16_logits_is_taken_in_float32() -> None:
    logits = torch.full((1, 8), 3.0, dtype=torch.bfloat16)
    loss = router_z_loss(logits)
    torch.testing.assert_close(loss, torch.tensor((3 + math.log(8)) ** 2))


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_gradient_of_the_z_loss(num_tokens: int, generator: torch.Generator) -> None:
    logits = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(router_z_loss, (logits.requires_grad_(),))


def test_z_loss_of_records_is_the_mean_over_tokens_summed_over_layers() -> None:
    ids, shares = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    layers = [
        record(ids, shares, logz=torch.tensor([3.0, 1.0], requires_grad=True)),
        record(ids, shares, logz=torch.tensor([0.0, 2.0], requires_grad=True)),
    ]
    assert z_loss(layers).item() == 10 / 2 + 4 / 2


def test_orthogonal_rows_cost_nothing_and_parallel_rows_one() -> None:
    assert orthogonality_loss(torch.diag(torch.tensor([1.0, 20.0, 0.3]))).item() == 0
    parallel = torch.tensor([[1.0, 2.0], [-3.0, -6.0], [0.5, 1.0]])
    torch.testing.assert_close(orthogonality_loss(parallel), torch.tensor(1.0))


def test_orthogonality_by_hand() -> None:
    # Cosines: 1/sqrt(2) for the pairs (0, 1) and (1, 2), 0 for (0, 2).
    loss = orthogonality_loss(torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 5.0]]))
    torch.testing.assert_close(loss, torch.tensor((0.5 + 0.5 + 0) / 3))


def test_orthogonality_equals_the_reference_and_ignores_lengths(
    generator: torch.Generator,
) -> None:
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    expected = reference.orthogonality_loss(weight)
    torch.testing.assert_close(orthogonality_loss(weight), expected)
    lengths = torch.tensor([[0.1], [1.0], [7.0], [3.0]], dtype=torch.float64)
    torch.testing.assert_close(orthogonality_loss(weight * lengths), expected)
    assert torch.autograd.gradcheck(orthogonality_loss, (weight.requires_grad_(),))


def test_a_single_expert_has_no_pair_and_no_orthogonality_loss() -> None:
    weight = torch.ones(1, 4, requires_grad=True)
    loss = orthogonality_loss(weight)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(weight.grad, torch.zeros(1, 4))
