"""The mixture-of-experts layer."""

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_moe.config import MoEConfig
from lightning_moe.nn.byte_rows import arrived
from lightning_moe.nn.dispatch import Dispatcher, LocalDispatcher
from lightning_moe.nn.experts import Experts
from lightning_moe.nn.init import draw_seed, give_memory_, init_weights_
from lightning_moe.nn.latent import LatentProjections
from lightning_moe.nn.mlp import MLP
from lightning_moe.nn.router import Router
from lightning_moe.ops.ranges import named_range
from lightning_moe.ops.records import Routing
from lightning_moe.ops.routing import count_experts


class MoE(nn.Module):
    """Sends each token to `top_k` of E experts and adds up their weighted outputs.

    Usable in any module: `y, routing = moe(x)`. No token is dropped, unless a strategy's dispatcher does.

    Memory, in numbers per token copy, of SwiGLU experts of hidden size F on rows of width W: forward keeps the row (W),
    [up; gate] (2F) and the output (W), which the gradient of its weight needs; the product F between the matmuls is
    kept as well, although it could be computed again from [up; gate]. No step of backward can do with less than what
    later steps read, its incoming gradient and its outgoing one: 3W + 2F while outputs are combined, 2W + 3F in the
    down projection, W + 5F in the activation, 2W + 2F in the up projection, beside the output (W per token) and the
    gradients of the weights. The largest of these is the floor; the layer stays within 1.2 of it.

    Attributes:
        router: reads the full width D.
        experts: stacked weights of the routed experts.
        latent: projections to and from the experts' width, or None.
        shared: an MLP that every token passes, added unscaled, or None.
        dispatcher: how rows reach experts; a strategy swaps in one that communicates.
    """

    def __init__(
        self, d_model: int, config: MoEConfig, *, init_std: float = 0.02, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        config.check_width(d_model)
        self.config = config
        self.init_std = init_std
        device = torch.get_default_device()
        # On the meta device first, as the whole transformer is: torch's generator then gives one seed for all weights.
        with torch.device("meta"):
            self.router = Router(d_model, config.num_experts, config.router)
            self.latent = (
                LatentProjections(d_model, config.latent, norm_eps=norm_eps)
                if config.latent
                else None
            )
            self.experts = Experts(config.latent.latent_dim if config.latent else d_model, config)
            self.shared = (
                MLP(d_model, config.shared.hidden_size, config.shared.activation)
                if config.shared
                else None
            )
        self.dispatcher: Dispatcher = LocalDispatcher()
        if device.type != "meta":
            give_memory_(self, device)
            self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights anew; `seed` defaults to one from torch's global generator."""
        init_weights_(self, seed=draw_seed() if seed is None else seed, std=self.init_std)

    def forward(
        self, x: Float[Tensor, "*rows D"], valid: Bool[Tensor, "*rows"] | None = None
    ) -> tuple[Float[Tensor, "*rows D"], Routing]:
        """Output of the layer and the record of its routing.

        Args:
            x: tokens; with three dimensions the first one counts sequences.
            valid: tokens that count in the record (padding doesn't); None counts all. The output is the same.
        """
        with named_range("router"):
            weights, ids, routing = self.router(x, valid)
        x_TD, weights_TK, ids_TK = x.flatten(0, -2), weights.flatten(0, -2), ids.flatten(0, -2)
        inner_TW = x_TD if self.latent is None else self.latent.compress(x_TD)
        dispatcher = self.dispatcher.for_mode(training=self.training)
        with named_range("dispatch"):
            flight = dispatcher.dispatch(
                self.experts.encode(inner_TW), ids_TK, weights_TK, self.config.num_experts
            )
        # The shared expert needs no rows of other ranks, so it computes while they travel.
        shared_TD = None if self.shared is None else self.shared(x_TD)
        with named_range("dispatch"):
            sent = arrived(dispatcher, flight, inner_TW)
        del flight  # frees the rows in their order of arrival, which `sent` may hold sorted
        with named_range("experts"):
            rows_RW = self.experts(sent.rows_RW, sent.counts_L, sent.bytes_RZ)
        with named_range("combine"):
            y_TD = dispatcher.combine(rows_RW, weights_TK, sent.back)
        del rows_RW  # without a backward nothing needs the experts' outputs any more
        if self.latent is not None:
            y_TD = self.latent.expand(y_TD)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if sent.kept_TK is not None:
            routing = _with_drops(routing, ids_TK, sent.kept_TK, valid)
        return y_TD.unflatten(0, x.shape[:-1]), routing


def named_moe_layers(module: nn.Module) -> dict[str, MoE]:
    """The MoE layers of any module by name, in the order of `module.modules()`."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}


def moe_layers(module: nn.Module) -> list[MoE]:
    """The MoE layers of any module, in the order of `module.modules()`."""
    return list(named_moe_layers(module).values())


def _with_drops(routing: Routing, ids_TK: Tensor, kept_TK: Tensor, valid: Tensor | None) -> Routing:
    """The record with the token copies that were kept; padding is not counted."""
    if valid is not None:
        valid_T1 = valid.flatten().unsqueeze(-1)
        kept_TK = kept_TK & valid_T1
    kept_E = count_experts(torch.where(kept_TK, ids_TK, -1), routing.kept_E.numel())
    arrived = kept_TK.any(dim=-1).sum()
    return dataclasses.replace(routing, kept_E=kept_E, lost_tokens=routing.num_tokens - arrived)
