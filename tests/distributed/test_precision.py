"""Eight bits on several ranks: the training of one, with caches that follow the sharded weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_moe import FP8Config, MoEConfig, MoEPrecision, SharedExpertConfig
from tests.kit.rank_runs import Recorded, batches, config, fit, parallel, whole_weights
from tests.kit.ranks import run_ranks


def _train(
    rank: int, world: int, ep: int, precision: str
) -> tuple[list[float], dict[str, Tensor], bool]:
    """Losses, weights, and whether what the experts compute with is their weights' quantization."""
    torch.manual_seed(0)
    model = config(lb_loss_scope="sequence")
    assert isinstance(model.moe, MoEConfig)
    moe = replace(model.moe, backend="mxfp8", fp8=FP8Config(emulate=True), hidden_size=64)
    module = Recorded(replace(model, d_model=32, moe=moe), lambda p: torch.optim.AdamW(p, lr=1e-3))
    strategy = parallel(ep) if world > 1 else "auto"
    data = batches(rank, world, steps=4, accumulate=2)
    fit(
        rank,
        world,
        module,
        data,
        strategy=strategy,
        precision=precision,
        accumulate_grad_batches=2,
    )
    fresh = True
    for layer in module.moe_layers:
        experts = layer.experts
        rows, counts = (
            torch.ones(2, 32, dtype=experts.w_down.dtype),
            torch.zeros(len(experts.expert_ids)),
        )
        counts[0] = 2
        kept = experts(rows, counts.long())
        experts.backend.forget()
        fresh &= torch.equal(kept, experts(rows, counts.long()))
    return module.losses, whole_weights(module, strategy), fresh


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_train_as_one_does(ep: int, precision: str) -> None:
    [alone] = run_ranks(_train, 1, 1, precision)
    for losses, weights, fresh in run_ranks(_train, 2, ep, precision):
        assert fresh
        # Gradients are added up in another order, and a code flips where a value lies between two.
        assert losses == pytest.approx(alone[0], rel=1e-3)
        assert weights.keys() == alone[1].keys()
        if precision == "32-true":
            for name, weight in weights.items():
                assert (weight - alone[1][name]).norm() < 0.01 * alone[1][name].norm() + 0.01


def _refusal(rank: int, world: int) -> tuple[str, int]:
    """The error of a backend that the device can't run, and how many batches came before it."""
    model = config()
    assert isinstance(model.moe, MoEConfig)
    moe = replace(model.moe, backend="mxfp8")
    module = Recorded(replace(model, d_model=32, moe=moe), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"model\.moe\.backend") as error:
        fit(rank, world, module, [], strategy=parallel(2), precision="32-true")
    return str(error.value), len(module.losses)


def test_a_backend_that_the_device_cannot_run_is_refused_on_all_ranks_before_training() -> None:
    for message, num_steps in run_ranks(_refusal, 2):
        assert "model.moe.backend=mxfp8 can't run these experts: the device is cpu" in message
        assert num_steps == 0


# Ranks of the experts, and what linear layers compute in.
LINEARS = [(1, "fp8_rowwise"), (2, "fp8_tensorwise"), (2, "mxfp8")]


def _train_linears(rank: int, world: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights; a rank's batch is a micro-batch of one rank, whose values may share a scale."""
    # All in one process: to import torchao takes seconds.
    return [_train_linears_in(rank, world, ep, linears) for ep, linears in LINEARS]


def _train_linears_in(
    rank: int, world: int, ep: int, linears: str
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = config(lb_loss_scope="sequence")
    assert isinstance(model.moe, MoEConfig)
    moe = replace(model.moe, shared=SharedExpertConfig(hidden_size=32))
    # A row of 32 would be one block: two formats would be the same.
    module = Recorded(replace(model, d_model=64, moe=moe), lambda p: torch.optim.AdamW(p, lr=1e-3))
    strategy = parallel(ep) if world > 1 else "auto"
    accumulate = 4 // world
    fit(
        rank,
        world,
        module,
        batches(rank, world, steps=4, accumulate=accumulate),
        strategy=strategy,
        precision=None,
        plugins=[MoEPrecision(linears=linears, base="32-true", emulate=True)],
        accumulate_grad_batches=accumulate,
    )
    return module.losses, whole_weights(module, strategy)


def test_linear_layers_in_eight_bits_train_on_two_ranks_as_on_one() -> None:
    alone = _train_linears(0, 1)
    # Formats show in the losses, so ranks that left the plugin out would fail below.
    assert len({tuple(losses) for losses, _ in alone}) == len(LINEARS)
    for of_rank in run_ranks(_train_linears, 2):
        for (losses, weights), expected in zip(of_rank, alone, strict=True):
            # Gradients are added up in another order, and a code flips where a value lies between two.
            assert losses == pytest.approx(expected[0], rel=1e-3)
            assert weights.keys() == expected[1].keys()
            for name, weight in weights.items():
                apart = (weight - expected[1][name]).norm()
                assert apart < 0.01 * expected[1][name].norm() + 0.01
