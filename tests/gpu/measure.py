"""What checks on a GPU have in common: sizes, results, accuracy and time of one layer."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

ROUNDS: Final = 7
GIB: Final = 2**30
# Decibels: what rounding to the type costs through two matmuls, with room to spare; a wrong path is below 10.
LEAST_SNR: Final = {torch.float32: 60.0, torch.bfloat16: 35.0}
LEAST_SNR_FP8: Final = 18.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A layer and its tokens."""

    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Of the experts' matmuls, forward and backward."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.width * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        passed: None if it was skipped.
        detail: what was measured, or why it was skipped, for people.
        numbers: what was measured, for programs.
    """

    check: str
    subject: str
    passed: bool | None
    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


def signal_to_noise(found: Tensor, expected: Tensor) -> float:
    """Decibels of `expected` over the difference; infinite where there is none, NaN where a value isn't finite."""
    expected = expected.double()
    noise = float((found.double() - expected).square().sum())
    signal = float(expected.square().sum())
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def tokens(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shape = size.tokens, size.width
    x, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return x.requires_grad_(), gradient


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """One forward and backward: output and gradients."""
    layer.zero_grad()
    x.grad = None
    y, _ = layer(x)
    y.backward(gradient)
    named = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    return {"y": y.detach()} | {name: g for name, g in named.items() if g is not None}


def against(
    exact: nn.Module, layer: nn.Module, data: tuple[Tensor, Tensor], *, subject: str, least: float
) -> Result:
    """Compare `layer` with `exact`, which gets its weights and is in float64 on the CPU."""
    exact.load_state_dict(layer.state_dict())
    x, gradient = data
    found = step(layer, x, gradient)
    expected = step(exact, x.detach().cpu().double().requires_grad_(), gradient.cpu().double())
    decibels = {name: signal_to_noise(found[name].cpu(), value) for name, value in expected.items()}
    worst = min(decibels, key=lambda name: decibels[name])
    return Result(
        check="accuracy",
        subject=subject,
        passed=all(value >= least for value in decibels.values()),
        detail=f"{decibels[worst]:.0f} dB at worst ({worst}), {least:.0f} needed",
        numbers={"decibels": decibels[worst]},
    )


def timed(layer: nn.Module, size: Size, device: torch.device, *, subject: str) -> Result:
    """Measure `layer`, whose matmuls have the FLOPs of `size`."""
    x, gradient = tokens(size, torch.bfloat16, device)
    step(layer, x, gradient)
    peak_memory(device)
    seconds = statistics.median(
        _seconds(lambda: step(layer, x, gradient), device) for _ in range(ROUNDS)
    )
    numbers = {"milliseconds": seconds * 1e3, "tflops": size.flops / seconds / 1e12}
    detail = f"{numbers['milliseconds']:.2f} ms, {numbers['tflops']:.1f} TFLOP/s"
    if (most := peak_memory(device)) is not None:
        numbers["peak_gib"] = most / GIB
        detail += f", {numbers['peak_gib']:.2f} GiB at most"
    return Result(check="speed", subject=subject, passed=True, detail=detail, numbers=numbers)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes allocated since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most
