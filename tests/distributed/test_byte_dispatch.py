"""Experts in eight bits on several ranks: codes and scales travel in place of rows, and nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.config import FP8Config, LatentMoEConfig, SharedExpertConfig
from tests.kit.host_syncs import HostSyncs
from tests.kit.ranks import run_ranks
from tests.kit.spread_layers import (
    BACKWARD,
    CASES,
    FORWARD,
    Case,
    assert_equals_one_rank,
    connect,
    objective,
    run,
    spread,
)

WIDTH = 32
# Of the layer, and whether autocast computes in bfloat16.
TYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
# What a row of that width is: codes, then a scale of one byte per 32 or of four per row.
ROW_BYTES = {"mxfp8": WIDTH + 1, "fp8_rowwise": WIDTH + 4}
BACKENDS = pytest.mark.parametrize("backend", list(ROW_BYTES))
DISPATCHERS = pytest.mark.parametrize("dispatcher", list(FORWARD))

PLAIN = Case(width=WIDTH, hidden=32)
EIGHT_BITS = {
    "plain": PLAIN,
    "latent, shared": replace(
        PLAIN,
        width=2 * WIDTH,
        options={
            "latent": LatentMoEConfig(latent_dim=WIDTH),
            "shared": SharedExpertConfig(hidden_size=5),
        },
    ),
    **{
        name: replace(CASES[name], width=WIDTH, hidden=32)
        for name in (
            "one_expert_per_rank_at_most",
            "all_on_one_rank",
            "all_on_one_expert",
            "a_rank_without_tokens",
            "no_tokens_at_all",
            "one_token",
            "recomputed_all_on_one_rank",
        )
    },
}


def _in(backend: str, case: Case) -> Case:
    options = {**case.options, "backend": backend, "fp8": FP8Config(emulate=True)}
    return replace(case, options=options)


def _as_they_are(x_TW: Tensor) -> Tensor:
    """In place of `Experts.encode`: rows travel, and the experts quantize what they receive."""
    return x_TW


def _step(layer: Any, x: Tensor, mix: Tensor, *, recompute: bool) -> dict[str, Tensor]:
    """Outputs in training and evaluation, counts, and every gradient."""
    x = x.clone().requires_grad_()
    y, record = run(layer, x, recompute=recompute)
    objective([(y, mix, record)]).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.eval()
    with torch.inference_mode():
        evaluated, _ = layer(x.detach())
    return {
        "y": y.detach(),
        "evaluated": evaluated,
        "kept": record.kept_E,
        "x": x.grad,
        **gradients,
    }


def _changes_nothing(rank: int, world: int, dispatcher: str, backend: str) -> None:
    mesh, _ = connect(world)
    cases: dict[str, tuple[Case, dict[str, Any]]] = {
        **{name: (case, {}) for name, case in EIGHT_BITS.items()},
        "not finite": (PLAIN, {}),
    }
    if dispatcher == "static":
        overfull = replace(PLAIN, tokens=(20, 30), crowded=(1,))
        cases["overfull"] = (overfull, {"capacity_factor": 1.0})
    for name, (rows, options) in cases.items():
        case = _in(backend, rows)
        for dtype, autocast in TYPES if name == "plain" else TYPES[:1]:
            x, mix = case.tokens_of(rank, dtype)
            if name == "not finite":
                x[0, 3], x[1, 5] = torch.nan, torch.inf
            found = []
            for in_bytes in (True, False):
                layer = spread(case.layer(dtype), mesh, dispatcher, **options)
                if not in_bytes:
                    layer.experts.encode = _as_they_are
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    found.append(_step(layer, x, mix, recompute=case.recompute))
            for key, expected in found[1].items():
                torch.testing.assert_close(
                    found[0][key],
                    expected,
                    rtol=0,
                    atol=0,
                    equal_nan=True,
                    msg=lambda m, where=(name, dtype, autocast, key): f"{where}: {m}",
                )


@DISPATCHERS
@BACKENDS
@pytest.mark.parametrize("world", [2, 4])
def test_quantizing_before_the_exchange_changes_no_bit(
    world: int, backend: str, dispatcher: str
) -> None:
    run_ranks(_changes_nothing, world, dispatcher, backend, timeout_s=180)


@DISPATCHERS
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("mxfp8", "plain"),
        ("fp8_rowwise", "all_on_one_expert"),
        ("mxfp8", "recomputed_all_on_one_rank"),
        ("fp8_rowwise", "a_rank_without_tokens"),
    ],
)
def test_outputs_and_gradients_equal_one_rank(
    backend: str, name: str, world: int, dispatcher: str
) -> None:
    case = _in(backend, EIGHT_BITS[name])
    # float32 sums of values near 1, in another order.
    run_ranks(assert_equals_one_rank, world, case, dispatcher, torch.float32, 2e-5, timeout_s=120)


def _sent(
    rank: int, world: int, dispatcher: str, backend: str, dtype: torch.dtype, recompute: bool
) -> tuple[list[Any], list[Any]]:
    """(kind, bytes) of the collectives of one step, forward and backward."""
    mesh, ledger = connect(world)
    case = _in(backend, PLAIN)
    layer = spread(case.layer(dtype), mesh, dispatcher, **_slots(dispatcher))
    if dispatcher == "static":
        layer.dispatcher.warmup(16, torch.device("cpu"))
    x, mix = case.tokens_of(rank, dtype)
    y, record = run(layer, x.requires_grad_(), recompute=recompute)
    forward = len(ledger.order)
    objective([(y, mix, record)]).backward()
    assert [axis for _, axis in ledger.order] == ["ep"] * len(ledger.order)
    sent = [(kind, size) for (kind, _), size in zip(ledger.order, ledger.sizes, strict=True)]
    return sent[:forward], sent[forward:]


def _slots(dispatcher: str) -> dict[str, float]:
    """16 tokens, two choices, eight experts: with factor 2, eight slots each."""
    return {"capacity_factor": 2.0} if dispatcher == "static" else {}


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_dispatch_is_smaller_and_by_as_much_as_codes_are(
    dtype: torch.dtype, backend: str
) -> None:
    slots, row = 8 * 8, WIDTH * dtype.itemsize
    row_bytes = ROW_BYTES[backend]
    for forward, backward in run_ranks(_sent, 2, "static", backend, dtype, False):
        assert forward == [("all_to_all", slots * row_bytes), ("all_to_all", slots * row)]
        assert backward == [("all_to_all", slots * row)] * 2
    ranks = run_ranks(_sent, 2, "all_to_all", backend, dtype, False)
    # Two copies of each of five and of three tokens.
    for (forward, backward), copies in zip(ranks, (10, 6), strict=True):
        assert forward[1] == ("all_to_all", copies * row_bytes)
        # On this way back the gradients of what was combined go out.
        assert backward[0] == ("all_to_all", copies * row)
        assert forward[2] == backward[1]
    assert sum(forward[2][1] for forward, _ in ranks) == 16 * row


@DISPATCHERS
def test_collectives_are_as_many_as_of_rows_and_recomputation_repeats_them(dispatcher: str) -> None:
    kinds = [kind for kind, _ in FORWARD[dispatcher]]
    back = [kind for kind, _ in BACKWARD]
    for recompute, expected in ((False, back), (True, kinds + back)):
        for forward, backward in run_ranks(_sent, 2, dispatcher, "mxfp8", torch.float32, recompute):
            assert [kind for kind, _ in forward] == kinds
            assert [kind for kind, _ in backward] == expected


def _syncs(rank: int, world: int, backend: str) -> list[str]:
    mesh, _ = connect(world)
    case = _in(backend, PLAIN)
    layer = spread(case.layer(torch.float32), mesh, "static")
    found: list[str] = []
    for watched in (False, True):
        x, mix = case.tokens_of(rank, torch.float32)
        with HostSyncs() as syncs:
            y, record = run(layer, x.requires_grad_())
            objective([(y, mix, record)]).backward()
        found = syncs.found if watched else []
    return found


@BACKENDS
def test_static_dispatch_of_bytes_never_waits_for_the_device(backend: str) -> None:
    assert run_ranks(_syncs, 2, backend) == [[], []]
