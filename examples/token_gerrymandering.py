"""A balance loss below that of even load, and a load that is anything but even."""

import torch

from lightning_moe import RouterConfig
from lightning_moe.nn import Router, balance_loss
from lightning_moe.ops import dead_share, load_max_over_mean


@torch.no_grad()
def route(scores_TE: torch.Tensor) -> None:
    """Send tokens with these scores (rows that add up to 1) through a router, and say how even that is."""
    num_experts = scores_TE.shape[1]
    router = Router(num_experts, num_experts, RouterConfig(top_k=1)).double()
    router.trace = True
    router.weight.copy_(torch.eye(num_experts))
    record = router(scores_TE.clamp(min=1e-30).log())[2]  # the softmax gives the scores back
    print(
        f"balance loss {balance_loss([record]):.6f}, busiest / mean {load_max_over_mean(record.requested_E):.3f}, "
        f"dead experts {dead_share(record.requested_E) * num_experts:.0f} of {num_experts}, "
        f"mean margin {record.tokens.margin_T.mean():.2g}"
    )


print("even:")
route(torch.full((64, 64), 1e-3).double() + (1 - 64e-3) * torch.eye(64).double())

print("six tokens, two experts: two are sure of A, four choose B by a little:")
route(torch.tensor([[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4).double())

print("64 experts, 48 of them dead: each token prefers its live expert by a hair to all dead ones:")
num_dead, lead = 48, 1e-3
scores_TE = torch.zeros(160, 64).double()
scores_TE[:, 16:] = (1 - lead) / (num_dead + 1)
scores_TE[torch.arange(160), torch.arange(160) % 16] = (1 + num_dead * lead) / (num_dead + 1)
route(scores_TE)
