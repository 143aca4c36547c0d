"""A module on several ranks with a reducer, and its gradients beside those of one rank with everybody's tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_moe.nn import moe_layers
from lightning_moe.optim.sharded import ShardedState
from lightning_moe.parallel import GradientReducer, ParamLayout, ProcessMesh
from tests.kit.spread_layers import Case, connect, spread

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Dense, experts, dense; large enough that some parameters are split over two or four replicas."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.moe = Case(options={"expert_bias": True}).layer(torch.float32)
        self.wide = nn.Linear(6, 768)
        self.last = nn.Linear(768, 6, bias=False)
        self.unused = nn.Parameter(torch.zeros(5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.moe(self.first(x))
        return self.last(self.wide(y).tanh())


def make_tokens(rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * micro + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def mean_square(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


class Setup:
    """A module on this rank with a reducer, and if `split`, an AdamW over parts."""

    def __init__(
        self,
        module: nn.Module,
        world: int,
        ep: int,
        *,
        split: bool = False,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.mesh, self.ledger = connect(world, ep)
        if moe_layers(module):
            spread(module, self.mesh, "all_to_all")
        self.module = module
        self.layout = ParamLayout(module, self.mesh, split=split)
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable)
        self.sharded = ShardedState([self.optimizer], self.layout) if split else None
        targets = self.sharded.targets if self.sharded else {}
        self.reducer = GradientReducer(self.layout, targets, bucket_bytes=bucket_bytes)

    def zero_grad(self) -> None:
        """What the strategy's optimizers do in manual optimization."""
        self.optimizer.zero_grad()
        self.reducer.forget(self.optimizer)

    def backward(self, loss: Tensor, *, reduce: bool = True) -> None:
        """What the strategy does for one micro-batch."""
        self.reducer.enabled = reduce
        loss.backward()
        if reduce:
            self.reducer.finish()

    def gradients(self) -> Iterator[tuple[str, Tensor | None, slice]]:
        """What the optimizer reads, by name, and the flat part of the local tensor that it is for."""
        for name, spec in self.layout.specs.items():
            owner = self.layout.parameters[name]
            if self.sharded is not None:
                owner = self.sharded.targets.get(name, owner)
            yield name, owner.grad, slice(spec.chunk_start, spec.chunk_start + spec.chunk)


def _local(whole: Tensor, name: str, mesh: ProcessMesh) -> Tensor:
    """This rank's experts of a whole tensor."""
    if ".experts." not in f".{name}":
        return whole
    per_rank = len(whole) // mesh.ep.size
    return whole[mesh.ep.index * per_rank : (mesh.ep.index + 1) * per_rank]


def assert_gradients(setup: Setup, whole: nn.Module) -> None:
    """Every gradient equals that of the whole module on one rank; replicas have the same bits."""
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, gradient, part in setup.gradients():
        if expected[name] is None:
            assert gradient is None, name
            continue
        wanted = _local(expected[name], name, setup.mesh).flatten()[part]
        torch.testing.assert_close(
            gradient.flatten(), wanted, msg=lambda m, n=name: f"{n}: {m}", **CLOSE
        )
        spec = setup.layout.specs[name]
        if not spec.split:
            first = gradient.clone()
            setup.layout.replicas(spec).broadcast(first)
            assert torch.equal(first, gradient), name
