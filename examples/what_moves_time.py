"""One layer forward and backward, one thing changed at a time: CPU seconds of one thread, rounds take turns."""

import statistics
import sys
import time

import torch

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.nn import MLP, MoE
from lightning_moe.ops import load_max_over_mean

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 9
WIDTH, HIDDEN, TOKENS = 256, 128, 2048
torch.set_num_threads(1)


def layer(num_experts: int, **router: object) -> MoE:
    """Four active experts of equal size, however many there are."""
    torch.manual_seed(0)
    config = RouterConfig(top_k=4, normalize_expert_weights=1.0, **router)
    return MoE(WIDTH, MoEConfig(num_experts=num_experts, hidden_size=HIDDEN, router=config))


def step(module: torch.nn.Module, x: torch.Tensor) -> object:
    """Forward and backward; gives the routing record, if there is one."""
    module.zero_grad()
    output = module(x)
    y, record = output if isinstance(output, tuple) else (output, None)
    y.square().mean().backward()
    return record


x = torch.randn(TOKENS, WIDTH)
skewed = x + 2 * torch.randn(WIDTH)  # a direction that all tokens share
cases = {
    "32 experts, uniform routing": (layer(32, uniform_expert_assignment=True), x),
    "the same, of zeros": (layer(32, uniform_expert_assignment=True), 0 * x),
    "32 experts, random routing": (layer(32, random_expert_assignment=True), x),
    "32 experts, the router's own choice": (layer(32), x),
    "32 experts, its choice for skewed tokens": (layer(32), skewed),
    "8 experts, random routing": (layer(8, random_expert_assignment=True), x),
    "128 experts, random routing": (layer(128, random_expert_assignment=True), x),
    "dense, equal active FLOPs": (MLP(WIDTH, 4 * HIDDEN, "swiglu"), x),
}
seconds: dict[str, list[float]] = {name: [] for name in cases}
for _ in range(ROUNDS):
    for name, case in cases.items():
        started = time.process_time()
        record = step(*case)
        seconds[name].append(time.process_time() - started)
print(f"time / that of the first row, median [range] of {ROUNDS} rounds; busiest expert / mean")
for name, values in seconds.items():
    ratios = sorted(a / b for a, b in zip(values, next(iter(seconds.values())), strict=True))
    record = step(*cases[name])
    load = f"{load_max_over_mean(record.requested_E):.2f}" if record else ""
    print(f"{name:<42}{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]  {load}")
