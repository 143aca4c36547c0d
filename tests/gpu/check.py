"""What only a GPU can show, in a few minutes: `python -m tests.gpu.check`.

Accuracy against float64, work without waiting for the device, speed and memory of every expert backend, on one CUDA
device of compute capability 8.0 or newer. Prints one table; ends with 1 if a check failed.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, cast, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_moe.config import (
    AttentionConfig,
    Backend,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoE, MoETransformer
from lightning_moe.ops.top_experts import top_experts
from lightning_moe.parallel import AxisGroup, Ledger
from lightning_moe.parallel.static_dispatch import StaticDispatcher

OLDEST: Final = (8, 0)
ROUNDS: Final = 7
GIB: Final = 2**30
# Decibels: what rounding to the type costs through two matmuls, with room to spare; a wrong path is below 10.
LEAST_SNR: Final = {torch.float32: 60.0, torch.bfloat16: 35.0}
LEAST_SNR_FP8: Final = 18.0
NAMES: Final = tuple(name for name in get_args(Backend) if name != "auto")


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


ACCURACY: Final = Size(tokens=512, width=256, hidden=128, experts=16, top_k=4)
SPEED: Final = Size(tokens=16384, width=2048, hidden=1024, experts=64, top_k=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        passed: None if it was skipped.
        detail: what was measured, or why it was skipped.
    """

    check: str
    subject: str
    passed: bool | None
    detail: str


def refusal() -> str | None:
    """Why nothing can be checked here, or None."""
    if not torch.cuda.is_available():
        return (
            "tests.gpu.check needs a CUDA device, and torch sees none here; the CPU paths are "
            "covered by `make test`"
        )
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        return (
            f"tests.gpu.check needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}"
        )
    return None


def signal_to_noise(found: Tensor, expected: Tensor) -> float:
    """Decibels of `expected` over the difference; infinite where there is none, NaN where a value isn't finite."""
    expected = expected.double()
    noise = float((found.double() - expected).square().sum())
    signal = float(expected.square().sum())
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def build(size: Size, backend: str, dtype: torch.dtype, device: torch.device) -> MoE:
    """A layer with fixed weights, whose experts are chosen round robin: no near tie can send a token elsewhere."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=size.experts,
        hidden_size=size.hidden,
        router=RouterConfig(top_k=size.top_k, uniform_expert_assignment=True),
        backend=cast(Backend, backend),  # one of NAMES
    )
    return MoE(size.width, config, init_std=size.width**-0.5).to(device, dtype)


def why_not(layer: MoE) -> str | None:
    """Why the layer's backend can't run it here, or None."""
    try:
        layer.experts.backend.settle(layer.experts.sizes())
    except ValueError as error:
        return str(error)
    return None


def tokens(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shape = size.tokens, size.width
    x, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return x.requires_grad_(), gradient


def step(layer: MoE, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """One forward and backward: output and gradients."""
    layer.zero_grad()
    x.grad = None
    y, _ = layer(x)
    y.backward(gradient)
    named = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    return {"y": y.detach()} | {name: g for name, g in named.items() if g is not None}


def accuracy(size: Size, backend: str, dtype: torch.dtype, device: torch.device) -> Result:
    """Output and all gradients against the loop in float64 on the CPU, on the same rounded weights and tokens."""
    subject = f"{backend}, {str(dtype).removeprefix('torch.')}"
    layer = build(size, backend, dtype, device)
    if reason := why_not(layer):
        return Result(check="accuracy", subject=subject, passed=None, detail=reason)
    x, gradient = tokens(size, dtype, device)
    exact = build(size, "loop", torch.float64, torch.device("cpu"))
    exact.load_state_dict(layer.state_dict())
    found = step(layer, x, gradient)
    expected = step(exact, x.detach().cpu().double().requires_grad_(), gradient.cpu().double())
    decibels = {name: signal_to_noise(found[name].cpu(), value) for name, value in expected.items()}
    worst = min(decibels, key=lambda name: decibels[name])
    least = LEAST_SNR_FP8 if "fp8" in backend else LEAST_SNR[dtype]
    return Result(
        check="accuracy",
        subject=subject,
        passed=all(value >= least for value in decibels.values()),
        detail=f"{decibels[worst]:.0f} dB at worst ({worst}), {least:.0f} needed",
    )


def speed(size: Size, backend: str, device: torch.device) -> Result:
    """Time, matmul rate and peak memory of forward and backward in bfloat16."""
    layer = build(size, backend, torch.bfloat16, device)
    if reason := why_not(layer):
        return Result(check="speed", subject=backend, passed=None, detail=reason)
    x, gradient = tokens(size, torch.bfloat16, device)
    step(layer, x, gradient)
    before = _memory(device)
    seconds = statistics.median(
        _seconds(lambda: step(layer, x, gradient), device) for _ in range(ROUNDS)
    )
    memory = "" if before is None else f", {(_memory(device) or 0) / GIB:.2f} GiB at most"
    return Result(
        check="speed",
        subject=backend,
        passed=True,
        detail=f"{seconds * 1e3:.2f} ms, {size.flops / seconds / 1e12:.1f} TFLOP/s{memory}",
    )


def waiting(size: Size, dispatcher: str, device: torch.device) -> Result:
    """Whether a step of the layer makes the host wait for the device."""
    layer = build(size, "torch", torch.bfloat16, device)
    if reason := why_not(layer):
        return Result(check="no host sync", subject=dispatcher, passed=None, detail=reason)
    if dispatcher == "static":
        alone = AxisGroup("ep", (0,), 0, None, Ledger())
        static = StaticDispatcher(alone, num_experts=size.experts, top_k=size.top_k)
        static.warmup(size.tokens, device)
        layer.dispatcher = static
    # A choice by scores, since that is what training does.
    layer.router.config = replace(layer.router.config, uniform_expert_assignment=False)
    x, gradient = tokens(size, torch.bfloat16, device)
    step(layer, x, gradient)
    try:
        with _waiting_is_an_error(device):
            step(layer, x, gradient)
    except RuntimeError as error:
        return Result(check="no host sync", subject=dispatcher, passed=False, detail=str(error))
    return Result(check="no host sync", subject=dispatcher, passed=True, detail="none")


def choice(device: torch.device) -> Result:
    """Whether ties of every kind are broken as on a CPU."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-3, 3, (4096, 64), generator=generator).float() / 4
    scores[::7, 3], scores[::5, 9], scores[::3, 0] = math.inf, -0.0, math.nan
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    passed = torch.equal(top_experts(scores.to(device), 8).cpu(), expected)
    detail = "as a stable sort" if passed else "another expert than a stable sort chooses"
    return Result(check="ties", subject="top 8 of 64", passed=passed, detail=detail)


def offload(device: torch.device) -> Result:
    """Whether a model whose activations wait in host memory has the same gradients, from less device memory."""
    config = TransformerConfig(
        vocab_size=256,
        d_model=256,
        num_layers=4,
        attention=AttentionConfig(num_heads=4),
        moe=MoEConfig(num_experts=8, hidden_size=256, router=RouterConfig(top_k=2)),
    )
    ids = torch.randint(256, (4, 256), generator=torch.Generator().manual_seed(3)).to(device)
    gradients, peaks = [], []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = MoETransformer(replace(config, offload_activations=offloads)).to(device)
        _memory(device)
        model(ids)[0].square().mean().backward()
        peaks.append(_memory(device))
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    # Not equal bits: attention's backward may add up in any order on a GPU.
    passed = min(map(signal_to_noise, *gradients)) >= LEAST_SNR[torch.float32]
    memory = ""
    if peaks[0] is not None and peaks[1] is not None:
        passed = passed and peaks[1] < peaks[0]
        memory = f", {peaks[1] / GIB:.2f} GiB instead of {peaks[0] / GIB:.2f}"
    detail = f"{'the same gradients' if passed else 'gradients differ, or no less memory'}{memory}"
    return Result(check="offload", subject="4 layers", passed=passed, detail=detail)


def run(device: torch.device, *, accuracy_size: Size, speed_size: Size) -> list[Result]:
    """All checks."""
    results = [choice(device), offload(device)]
    results += [
        accuracy(accuracy_size, name, dtype, device) for name in NAMES for dtype in LEAST_SNR
    ]
    results += [waiting(accuracy_size, dispatcher, device) for dispatcher in ("local", "static")]
    results += [speed(speed_size, name, device) for name in NAMES]
    return results


def table(results: Sequence[Result], *, title: str) -> Table:
    """The results for people."""
    words = {True: "passed", False: "FAILED", None: "skipped"}
    made = Table(title=title)
    for name in ("check", "of", "result", "detail"):
        made.add_column(name)
    for result in results:
        made.add_row(result.check, result.subject, words[result.passed], result.detail)
    return made


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> int | None:
    """Most bytes allocated since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


@contextmanager
def _waiting_is_an_error(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    _synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print; 1 if something failed or nothing could be checked."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    if reason := refusal():
        Console(stderr=True, soft_wrap=True).print(reason)
        return 1
    # The reference is exact; TF32 would make float32 as coarse as 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    results = run(torch.device("cuda"), accuracy_size=ACCURACY, speed_size=SPEED)
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SPEED}"
    console = Console()
    console.width = max(console.width, 150)
    console.print(table(results, title=title))
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
