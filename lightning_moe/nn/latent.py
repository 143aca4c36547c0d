"""Projections around routed experts that work in a narrower space."""

from jaxtyping import Float
from torch import Tensor, nn

from lightning_moe.config import LatentMoEConfig
from lightning_moe.nn.norm import NORMS


class LatentProjections(nn.Module):
    """Projects D -> W before dispatch and W -> D after `combine`, so that only rows of width W travel.

    Source: LatentMoE, arXiv:2601.18089. The router still reads the full width.
    """

    def __init__(self, d_model: int, config: LatentMoEConfig, *, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.down = nn.Linear(d_model, config.latent_dim, bias=config.bias)
        eps = norm_eps if config.norm_eps is None else config.norm_eps
        self.norm = (
            NORMS[config.norm](config.latent_dim, eps=eps, bias=config.norm_bias)
            if config.norm
            else None
        )
        self.up = nn.Linear(config.latent_dim, d_model, bias=config.bias)

    def compress(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T W"]:
        """The experts' input."""
        latent_TW: Tensor = self.down(x_TD)
        return latent_TW

    def expand(self, y_TW: Float[Tensor, "T W"]) -> Float[Tensor, "T D"]:
        """The combined output at full width; cast after the norm, whose result may be wider than the weights."""
        if self.norm is not None:
            y_TW = self.norm(y_TW)
        y_TD: Tensor = self.up(y_TW.to(self.up.weight.dtype))
        return y_TD
