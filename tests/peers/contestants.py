"""The layers that race: ours, the blocks of transformers, and a dense layer of equal active FLOPs."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

from lightning_moe.nn import MLP, MoE
from lightning_moe.ops import load_max_over_mean
from tests.parity import hf

Kind = Literal["ours", "theirs", "dense"]
Work = Literal["forward", "forward + backward", "training step"]

SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One size of the race: tokens of a step and the sizes of the layer."""

    num_tokens: int
    layer: hf.Sizes

    def __str__(self) -> str:
        layer = self.layer
        return (
            f"T={self.num_tokens} D={layer.d_model} F={layer.hidden_size} "
            f"E={layer.num_experts} K={layer.top_k}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A layer with its weights and the tokens that it computes on.

    Attributes:
        layer: gives (1, T, D) for (1, T, D).
        x, gradient: input, and the gradient of the output.
        weights_hash: of the weights read back from the layer; of nothing for a dense layer.
        load_max_over_mean: how uneven the router was, where the layer says so.
        optimizer: AdamW over the layer's parameters, as torch has it by default.
    """

    layer: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    x: Tensor
    gradient: Tensor
    weights_hash: str
    load_max_over_mean: float | None
    optimizer: torch.optim.Optimizer

    @property
    def inputs_hash(self) -> str:
        """Of the tokens and of the gradient of the output."""
        return fingerprint(self.x, self.gradient)

    def step(self) -> Tensor:
        """One forward and backward; the output. The input has its gradient in `x.grad`."""
        y = self.layer(self.x)
        y.backward(self.gradient)
        return y

    def do(self, work: Work) -> None:
        """Without gradients, with them, or with an AdamW step as well; with other weights each time then."""
        if work == "forward":
            with torch.no_grad():
                self.layer(self.x)
            return
        self.step()
        if work == "training step":
            self.optimizer.step()

    def forget_gradients(self) -> None:
        """As an optimizer's zero_grad does between steps."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None


def fingerprint(*tensors: Tensor) -> str:
    """Twelve digits that differ as soon as one bit does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def build(kind: Kind, family: hf.Family, shape: Shape) -> Contestant:
    """The layer of that kind; of one family and shape all get the same weights and tokens."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = shape.layer
    weights = hf.random_weights(sizes, generator)
    x = torch.randn(1, shape.num_tokens, sizes.d_model, generator=generator).requires_grad_()
    gradient = torch.randn(1, shape.num_tokens, sizes.d_model, generator=generator)
    load, layer, held = None, None, None
    if kind == "ours":
        module: nn.Module = hf.our_layer(family, sizes, weights)
        layer, held = _output_of(module), hf.our_tensors(module)
        with torch.no_grad():
            load = float(load_max_over_mean(module(x)[1].requested_E))
    elif kind == "theirs":
        module = hf.their_layer(family, sizes, weights, implementation="grouped_mm")
        layer, held = module, hf.their_tensors(module)
    else:
        # As many multiplications as a token meets in its K experts, the router not counted.
        module = layer = MLP(sizes.d_model, sizes.top_k * sizes.hidden_size)
    hashed = () if held is None else (held.router, held.gate, held.up, held.down)
    parameters = tuple(module.train().parameters())
    return Contestant(
        layer=layer,
        parameters=parameters,
        # So small a rate that the routing of all rounds stays that of the first.
        optimizer=torch.optim.AdamW(parameters, lr=1e-9, weight_decay=0.0),
        x=x,
        gradient=gradient,
        weights_hash=fingerprint(*hashed) if hashed else "",
        load_max_over_mean=load,
    )


def _output_of(layer: MoE) -> Callable[[Tensor], Tensor]:
    """The layer without its second result; the routing record is computed all the same."""
    return lambda x: layer(x)[0]
