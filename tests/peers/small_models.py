"""A small transformer and its batch in two sizes: one to measure, and one that shows that a measurement runs."""

from dataclasses import dataclass
from typing import Final

from lightning_moe.config import (
    AttentionConfig,
    MoEConfig,
    Recompute,
    RouterConfig,
    TransformerConfig,
)

VOCABULARY: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, and the rows of a micro-batch on one rank."""

    d_model: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_layers: int
    rows: int
    length: int

    def config(self, *, recompute: Recompute = "none", **router: object) -> TransformerConfig:
        """Keywords go to the router."""
        moe = MoEConfig(
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            router=RouterConfig(top_k=self.top_k, **router),
        )
        return TransformerConfig(
            vocab_size=VOCABULARY,
            d_model=self.d_model,
            num_layers=self.num_layers,
            attention=AttentionConfig(num_heads=4),
            moe=moe,
            recompute=recompute,
        )


SIZES: Final = {
    "full": Size(
        d_model=256, hidden_size=256, num_experts=32, top_k=4, num_layers=4, rows=4, length=256
    ),
    "small": Size(
        d_model=32, hidden_size=16, num_experts=8, top_k=2, num_layers=2, rows=2, length=16
    ),
}
