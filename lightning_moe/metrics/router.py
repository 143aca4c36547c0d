"""Metrics of the routers' scores: the balance loss over everything seen, and the confidence of the choice."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_moe.metrics.layer_sums import LayerSums, inner_product
from lightning_moe.ops.records import Routing


class RouterBalance(LayerSums):
    """`balance_loss` of all tokens together, and its distance from 1, `inner_product`; one value per layer.

    f and P are taken over everything summed up: a wider scope than that of a loss in training. A loss below 1 beside
    a load that is uneven (`ExpertLoad`) is token gerrymandering, not balance. NaN before any token was seen.

    >>> from lightning_moe.ops import Routing
    >>> metric = RouterBalance(2)
    >>> # Tokens with scores (1, 0) twice and (.4, .6) four times.
    >>> metric.update(Routing(requested_E=torch.tensor([2, 4]), kept_E=torch.tensor([2, 4]),
    ...                       score_sums_E=torch.tensor([3.6, 2.4]).double(),
    ...                       logz_squared=torch.tensor(0.0), num_tokens=torch.tensor(6)))
    >>> round(metric.compute()["balance_loss"].item() * 15, 6)
    14.0

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        options: torchmetrics' own, such as `process_group`.
    """

    sums = ("requested", "score_sums")

    def compute(self) -> dict[str, Float[Tensor, " _"]]:
        """Both, one value per layer."""
        both = zip(self._by_layer("requested"), self._by_layer("score_sums"), strict=True)
        inner = torch.stack([inner_product(*pair) for pair in both])
        return {"balance_loss": 1 + inner, "inner_product": inner}


class RouterConfidence(LayerSums):
    """Mean `margin` and `entropy` (nats) of the choice of experts, per token and layer; see `ops.TokenRoutes`.

    Needs records of routers whose `trace` is on. Margins that are infinite, where nothing was left to choose, don't
    enter the mean; without any other it is NaN.

    >>> from lightning_moe.config import MoEConfig
    >>> from lightning_moe.nn import MoE
    >>> moe, metric = MoE(4, MoEConfig(num_experts=2)), RouterConfidence(2)
    >>> moe.router.trace = True
    >>> with torch.no_grad():
    ...     _ = moe.router.weight.zero_()
    >>> {name: round(value.item(), 4) for name, value in metric(moe(torch.ones(3, 4))[1]).items()}
    {'margin': 0.0, 'entropy': 0.6931}

    Args:
        num_experts: experts of the layer, or of each layer in the order of the records.
        options: torchmetrics' own, such as `process_group`.
    """

    sums = ("confidence",)

    def _checked(self, records: Routing | Sequence[Routing]) -> list[Routing]:
        found = super()._checked(records)
        if any(record.tokens is None for record in found):
            raise ValueError(
                "RouterConfidence needs records that tell the route of each token; set `moe.router.trace = True` "
                "on every MoE layer before its forward"
            )
        return found

    def compute(self) -> dict[str, Float[Tensor, " _"]]:
        """Both, one value per layer."""
        margin, num_margins, entropy, num_tokens = torch.stack(self._by_layer("confidence")).unbind(
            dim=-1
        )
        return {"margin": margin / num_margins, "entropy": entropy / num_tokens}
