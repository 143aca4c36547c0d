"""A CUDA graph of a layer with static dispatch."""

import torch

from lightning_moe.nn import MoE
from lightning_moe.parallel import AxisGroup, Ledger, StaticDispatch
from tests.gpu.measure import LEAST_SNR, Result, Size, signal_to_noise, step, tokens


def make_static(layer: MoE, size: Size) -> None:
    """Give the layer the static transport of a single rank."""
    alone = AxisGroup("ep", (0,), 0, None, Ledger())
    layer.dispatcher = StaticDispatch(warmup_tokens=size.tokens).build(alone, layer.config)


def graph(layer: MoE, size: Size, device: torch.device) -> Result:
    """Whether a captured forward and backward, launched on other tokens, gives what calling the layer gives.

    Args:
        layer: with static dispatch, in bfloat16.
        size: of its tokens.
        device: where it is.
    """
    if device.type != "cuda":
        return Result(check="graph", subject="static", passed=None, detail="needs a CUDA device")
    x, gradient = tokens(size, torch.bfloat16, device)
    # Work that is done once, such as choosing algorithms, can't be captured.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, x, gradient)
    torch.cuda.current_stream(device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step(layer, x, gradient)
    with torch.no_grad():
        x.copy_(x.flip(0) / 2)
    captured.replay()
    expected = step(layer, x, gradient)
    worst = min(signal_to_noise(found[name].cpu(), value.cpu()) for name, value in expected.items())
    # Not equal bits: sums in other orders on another stream.
    least = LEAST_SNR[torch.bfloat16]
    return Result(
        check="graph",
        subject="static",
        passed=worst >= least,
        detail=f"{worst:.0f} dB at worst on other tokens, {least:.0f} needed",
        numbers={"decibels": worst},
    )
