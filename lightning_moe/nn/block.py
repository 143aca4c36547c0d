"""One transformer layer: attention, then a dense or a mixture-of-experts feed-forward."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_moe.config import Compile, LayerSpec, MoEConfig, Recompute
from lightning_moe.nn.attention import Attention, AttentionContext
from lightning_moe.nn.mlp import MLP
from lightning_moe.nn.moe import MoE
from lightning_moe.nn.norm import RMSNorm
from lightning_moe.nn.offload import offloaded
from lightning_moe.nn.recompute import recomputed
from lightning_moe.ops.compiled import compiled
from lightning_moe.ops.ranges import named_range
from lightning_moe.ops.records import Routing

T = TypeVar("T")


class Block(nn.Module):
    """x + attention, then x + feed-forward, with RMS norms before (`pre`), after (`post`) or around (`peri`) each.

    In training, `layer.recompute` and `offload_activations` say which activations stay on the device until backward.

    Attributes:
        attention, feed_forward: the two sub-layers; `feed_forward` is an `MoE` or an `MLP`.
    """

    def __init__(
        self,
        d_model: int,
        layer: LayerSpec,
        *,
        norm_placement: Literal["pre", "post", "peri"] = "pre",
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        offload_activations: bool = False,
        compile_backend: Compile = "none",
    ) -> None:
        super().__init__()
        self.recompute = layer.recompute
        self.compile_backend = compile_backend
        self.offload_activations = offload_activations

        def norm(placed: bool) -> nn.Module:
            return RMSNorm(d_model, eps=norm_eps) if placed else nn.Identity()

        before, after = norm_placement != "post", norm_placement != "pre"
        feed_forward = layer.feed_forward
        self.attention_in_norm = norm(before)
        self.attention = Attention(d_model, layer.attention, norm_eps=norm_eps)
        self.attention_out_norm = norm(after)
        self.feed_forward_in_norm = norm(before)
        self.feed_forward: MoE | MLP
        if isinstance(feed_forward, MoEConfig):
            self.feed_forward = MoE(d_model, feed_forward, init_std=init_std, norm_eps=norm_eps)
        else:
            self.feed_forward = MLP(d_model, feed_forward.hidden_size, feed_forward.activation)
        self.feed_forward_out_norm = norm(after)

    def forward(
        self,
        x_BSD: Float[Tensor, "B S D"],
        context: AttentionContext,
        valid_BS: Bool[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"], Routing | None]:
        """Output of the layer, and the record of its routing if it routes."""
        offload = self.offload_activations and self._keeps_activations()
        with offloaded(self) if offload else nullcontext():
            if self._recomputes("block"):
                return recomputed(self._halves, x_BSD, context, valid_BS)
            return self._halves(x_BSD, context, valid_BS)

    def _halves(
        self, x_BSD: Tensor, context: AttentionContext, valid_BS: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        x_BSD = self._half("attention", Block._attend, x_BSD, context)
        return self._half("moe", Block._feed, x_BSD, valid_BS)

    def _attend(self, x_BSD: Tensor, context: AttentionContext) -> Tensor:
        inner_BSD = self.attention_in_norm(x_BSD)
        with named_range("attention"):
            mixed_BSD = self.attention(inner_BSD, context)
        out_BSD: Tensor = x_BSD + self.attention_out_norm(mixed_BSD)
        return out_BSD

    def _feed(self, x_BSD: Tensor, valid_BS: Tensor | None) -> tuple[Tensor, Routing | None]:
        routing = None
        inner_BSD = self.feed_forward_in_norm(x_BSD)
        if isinstance(self.feed_forward, MoE):
            y_BSD, routing = self.feed_forward(inner_BSD, valid_BS)
        else:
            y_BSD = self.feed_forward(inner_BSD)
        return x_BSD + self.feed_forward_out_norm(y_BSD), routing

    def _half(self, part: Recompute, function: Callable[..., T], *args: Any) -> T:
        """`function(self, *args)`, compiled if the config says so, recomputed in backward if `part` is to be.

        Recomputation wraps the compiled function, not the reverse: so it works with every dispatcher.
        """
        if self.compile_backend != "none":
            function = compiled(function, self.compile_backend)
        if self._recomputes(part):
            return recomputed(function, self, *args)
        return function(self, *args)

    def _recomputes(self, part: Recompute) -> bool:
        return self.recompute == part and self._keeps_activations()

    def _keeps_activations(self) -> bool:
        return self.training and torch.is_grad_enabled()
