"""One transformer layer: attention, then a dense or a mixture-of-experts feed-forward."""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_moe.config import LayerSpec, MoEConfig
from lightning_moe.nn.attention import Attention, AttentionContext
from lightning_moe.nn.mlp import MLP
from lightning_moe.nn.moe import MoE
from lightning_moe.nn.norm import RMSNorm
from lightning_moe.ops.records import Routing


class Block(nn.Module):
    """x + attention, then x + feed-forward, with RMS norms before (`pre`), after (`post`) or around (`peri`) each.

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
    ) -> None:
        super().__init__()

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
        x_BSD = x_BSD + self.attention_out_norm(
            self.attention(self.attention_in_norm(x_BSD), context)
        )
        routing = None
        inner_BSD = self.feed_forward_in_norm(x_BSD)
        if isinstance(self.feed_forward, MoE):
            y_BSD, routing = self.feed_forward(inner_BSD, valid_BS)
        else:
            y_BSD = self.feed_forward(inner_BSD)
        return x_BSD + self.feed_forward_out_norm(y_BSD), routing
