"""The MoE layer by itself: forward, balance loss, backward."""

import torch

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.nn import MoE, balance_loss

torch.manual_seed(0)
moe = MoE(
    d_model=64,
    config=MoEConfig(
        num_experts=8,
        hidden_size=128,
        router=RouterConfig(top_k=2, normalize_expert_weights=1.0),
    ),
)
x = torch.randn(4, 32, 64)  # 4 sequences of 32 tokens

y, routing = moe(x)
loss = y.square().mean() + 0.01 * balance_loss([routing])
loss.backward()

print("output:", tuple(y.shape))
print(
    "tokens per expert:", routing.requested_E.tolist(), "of", routing.num_tokens.item(), "x top-2"
)
print("gradient of the router:", tuple(moe.router.weight.grad.shape))
