"""MoE layers spread over ranks, and the same layer on one rank with everybody's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe.config import LatentMoEConfig, MoEConfig, RouterConfig, SharedExpertConfig
from lightning_moe.nn import MoE, z_loss
from lightning_moe.parallel import (
    AllToAllDispatch,
    AllToAllDispatcher,
    Ledger,
    MeshShape,
    ProcessMesh,
    StaticDispatch,
    apply_expert_parallel,
)
from tests.kit.randomized import randomized

WIDTH = 6
TIMEOUT = timedelta(seconds=120)
# (kind, axis) of the collectives of one layer, in order.
FORWARD = {
    "all_to_all": [("all_gather", "ep"), ("all_to_all", "ep"), ("all_to_all", "ep")],
    "static": [("all_to_all", "ep"), ("all_to_all", "ep")],
}
BACKWARD = [("all_to_all", "ep"), ("all_to_all", "ep")]


class OrderedLedger(Ledger):
    """Also keeps the order of the calls, and the bytes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, str]] = []
        self.sizes: list[int] = []

    def enter(self, kind: str, axis: str, payload: Tensor) -> None:
        super().enter(kind, axis, payload)
        self.order.append((kind, axis))
        self.sizes.append(payload.numel() * payload.element_size())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer and the tokens of each rank.

    Attributes:
        tokens: per rank; ranks beyond its end begin anew.
        width, hidden: of the experts.
        crowded: experts whose expert bias draws every token to them.
        recompute: run the layer inside a checkpoint.
    """

    num_experts: int = 8
    top_k: int = 2
    tokens: tuple[int, ...] = (5, 3, 7, 4)
    crowded: tuple[int, ...] = ()
    recompute: bool = False
    width: int = WIDTH
    hidden: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def layer(self, dtype: torch.dtype = torch.float64) -> MoE:
        """The whole layer, equal on all ranks."""
        router = RouterConfig(
            top_k=self.top_k, score_correction_bias=True, z_loss_weight=0.1, lb_loss_weight=0.1
        )
        config = MoEConfig(
            num_experts=self.num_experts, hidden_size=self.hidden, router=router, **self.options
        )
        layer = randomized(MoE(self.width, config), torch.Generator().manual_seed(1)).to(dtype)
        assert layer.router.score_bias is not None
        for expert in self.crowded:
            layer.router.score_bias[expert] += 100.0
        return layer

    def tokens_of(self, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Input of a rank, and the weights of its output in the loss."""
        generator = torch.Generator().manual_seed(10 + rank)
        shape = self.tokens[rank % len(self.tokens)], self.width
        x, mix = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return x.to(dtype), mix.to(dtype)


CASES = {
    "plain": Case(),
    "one_expert_per_rank_at_most": Case(num_experts=4),
    "all_on_one_rank": Case(crowded=(0, 1)),
    "all_on_one_expert": Case(top_k=1, crowded=(6,)),
    "a_rank_without_tokens": Case(tokens=(5, 0, 7, 0)),
    "no_tokens_at_all": Case(tokens=(0,)),
    "one_token": Case(tokens=(0, 1, 0, 0), top_k=1),
    "all_experts_chosen": Case(num_experts=4, top_k=4),
    "one_choice": Case(top_k=1),
    "latent_and_shared_and_biases": Case(
        options={
            "latent": LatentMoEConfig(latent_dim=4, bias=True, norm="rms"),
            "shared": SharedExpertConfig(hidden_size=5),
            "expert_bias": True,
        }
    ),
    "recomputed": Case(recompute=True, options={"expert_bias": True}),
    "recomputed_all_on_one_rank": Case(recompute=True, crowded=(0, 1)),
}


def connect(world: int, ep: int | None = None) -> tuple[ProcessMesh, OrderedLedger]:
    """A mesh over all ranks, with a ledger that keeps the order."""
    mesh = ProcessMesh(MeshShape(world=world, ep=world if ep is None else ep), TIMEOUT)
    ledger = OrderedLedger()
    for group in (mesh.world, mesh.stage, mesh.ep, mesh.ep_dp):
        group.ledger = ledger
    return mesh, ledger


def spread(layer: MoE, mesh: ProcessMesh, dispatcher: str, **options: Any) -> MoE:
    """The same layer with this rank's experts only; `static` has room for everything unless told otherwise."""

    def make(owner: MoE) -> Any:
        if dispatcher == "all_to_all":
            return AllToAllDispatcher(mesh.ep, AllToAllDispatch(**options))
        everything = {"capacity_factor": owner.config.num_experts / owner.config.router.top_k}
        return StaticDispatch(**{**everything, **options}).build(mesh.ep, owner.config)

    apply_expert_parallel(layer, mesh.shape, mesh.rank, make)
    return layer


def run(layer: MoE, x: Tensor, *, recompute: bool = False) -> tuple[Tensor, Any]:
    """Output and record."""
    forward: Callable[..., Any] = layer
    if recompute:
        return checkpoint(forward, x, use_reentrant=False)
    return forward(x)


def objective(parts: Sequence[tuple[Tensor, Tensor, Any]]) -> Tensor:
    """A loss that is a sum over tokens: of (output, mix, record) triples."""
    total = parts[0][0].new_zeros(())
    for y, mix, record in parts:
        scores = record.score_sums_E * torch.arange(1, len(record.score_sums_E) + 1)
        total = total + (y * mix).sum() + z_loss([record], reduction="sum") + scores.sum()
    return total


def on_one_rank(
    case: Case, world: int, dtype: torch.dtype
) -> tuple[MoE, list[Tensor], list[Tensor], Any]:
    """Everybody's tokens through the whole layer, as one batch; gradients lie in `.grad`."""
    layer = case.layer(dtype)
    tokens = [case.tokens_of(rank, dtype) for rank in range(world)]
    x = torch.cat([own for own, _ in tokens]).requires_grad_()
    y, record = run(layer, x)
    objective([(y, torch.cat([mix for _, mix in tokens]), record)]).backward()
    sizes = [len(own) for own, _ in tokens]
    return layer, list(y.split(sizes)), list(x.grad.split(sizes)), record


def assert_equals_one_rank(
    rank: int,
    world: int,
    case: Case,
    dispatcher: str,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
) -> None:
    """Outputs, records and every gradient of a layer over all ranks are those of one rank."""
    mesh, ledger = connect(world)
    layer = spread(case.layer(dtype), mesh, dispatcher)
    x, mix = case.tokens_of(rank, dtype)
    x.requires_grad_()
    y, record = run(layer, x, recompute=case.recompute)
    objective([(y, mix, record)]).backward()
    whole, outputs, input_gradients, everyone = on_one_rank(case, world, dtype)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(y, outputs[rank], **close)
    torch.testing.assert_close(x.grad, input_gradients[rank], **close)
    requested = record.requested_E.clone()
    dist.all_reduce(requested)
    assert torch.equal(requested, everyone.requested_E)
    assert torch.equal(record.kept_E, record.requested_E)
    experts = slice(layer.experts.expert_ids.start, layer.experts.expert_ids.stop)
    for (path, got), wanted in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert got.grad is not None, path
        # Of the mean over ranks: experts have it at once, dense parameters once they are averaged.
        gradient, expected = got.grad.clone(), wanted.grad / world
        if path.startswith("experts."):
            expected = expected[experts]
        else:
            dist.all_reduce(gradient)
            gradient /= world
        torch.testing.assert_close(gradient, expected, msg=lambda m, p=path: f"{p}: {m}", **close)
    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, ledger.order)
    assert all(order == sizes[0] for order in sizes)
