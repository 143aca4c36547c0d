"""What only a GPU can show, in a few minutes: `python -m tests.gpu.check`.

Accuracy against float64, work without waiting for the device, a CUDA graph, speed and memory of every expert backend,
accuracy and speed of linear layers in every eight-bit format, whole steps of the Trainer, on one CUDA device of compute
capability 8.0 or newer. Prints one table, writes it as JSON (`--json FILE`); ends with 1 if a check failed.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, cast, get_args

import torch
from rich.console import Console
from rich.table import Table

from lightning_moe.config import (
    AttentionConfig,
    ExpertBackendName,
    LinearFormat,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)
from lightning_moe.nn import MoE, MoETransformer
from lightning_moe.ops.top_experts import top_experts
from tests.gpu.graphs import graph, make_static
from tests.gpu.linears import linear_accuracy, linear_speed
from tests.gpu.measure import (
    GIB,
    LEAST_SNR,
    LEAST_SNR_FP8,
    Result,
    Size,
    against,
    peak_memory,
    signal_to_noise,
    step,
    synchronize,
    timed,
    tokens,
)
from tests.gpu.training import TRAINING, Training, matmul_rate, training

OLDEST: Final = (8, 0)
NAMES: Final = tuple(name for name in get_args(ExpertBackendName) if name != "auto")
ACCURACY: Final = Size(tokens=512, width=256, hidden=128, experts=16, top_k=4)
SPEED: Final = Size(tokens=16384, width=2048, hidden=1024, experts=64, top_k=8)


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


def build(size: Size, backend: str, dtype: torch.dtype, device: torch.device) -> MoE:
    """A layer with fixed weights, whose experts are chosen round robin: no near tie can send a token elsewhere."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=size.experts,
        hidden_size=size.hidden,
        router=RouterConfig(top_k=size.top_k, uniform_expert_assignment=True),
        backend=cast(ExpertBackendName, backend),  # one of NAMES
    )
    return MoE(size.width, config, init_std=size.width**-0.5).to(device, dtype)


def why_not(layer: MoE) -> str | None:
    """Why the layer's backend can't run it here, or None."""
    try:
        layer.experts.backend.settle(layer.experts.sizes())
    except ValueError as error:
        return str(error)
    return None


def accuracy(size: Size, backend: str, dtype: torch.dtype, device: torch.device) -> Result:
    """Output and all gradients against the loop in float64 on the CPU, on the same rounded weights and tokens."""
    subject = f"{backend}, {str(dtype).removeprefix('torch.')}"
    layer = build(size, backend, dtype, device)
    if reason := why_not(layer):
        return Result(check="accuracy", subject=subject, passed=None, detail=reason)
    exact = build(size, "loop", torch.float64, torch.device("cpu"))
    least = LEAST_SNR_FP8 if "fp8" in backend else LEAST_SNR[dtype]
    return against(exact, layer, tokens(size, dtype, device), subject=subject, least=least)


def speed(size: Size, backend: str, device: torch.device) -> Result:
    """Time, matmul rate and peak memory of forward and backward in bfloat16."""
    layer = build(size, backend, torch.bfloat16, device)
    if reason := why_not(layer):
        return Result(check="speed", subject=backend, passed=None, detail=reason)
    return timed(layer, size, device, subject=backend)


def waiting(size: Size, dispatcher: str, device: torch.device) -> Result:
    """Whether a step of the layer makes the host wait for the device."""
    layer = build(size, "torch", torch.bfloat16, device)
    if reason := why_not(layer) or _expected_waits(layer):
        return Result(check="no host sync", subject=dispatcher, passed=None, detail=reason)
    # By scores, since that is what training does.
    layer.router.config = replace(layer.router.config, uniform_expert_assignment=False)
    if dispatcher == "static":
        make_static(layer, size)
    x, gradient = tokens(size, torch.bfloat16, device)
    step(layer, x, gradient)
    try:
        with _waiting_is_an_error(device):
            step(layer, x, gradient)
    except RuntimeError as error:
        return Result(check="no host sync", subject=dispatcher, passed=False, detail=str(error))
    return Result(check="no host sync", subject=dispatcher, passed=True, detail="none")


def _expected_waits(layer: MoE) -> str | None:
    """What the backend itself says of waiting here, or None if it doesn't wait."""
    sizes = layer.experts.sizes()
    waits = layer.experts.backend.settle(sizes).host_waits(sizes)
    return layer.experts.backend.account(sizes) if waits else None


def replay(size: Size, device: torch.device) -> Result:
    """Whether a CUDA graph of the static path computes what the layer does."""
    layer = build(size, "torch", torch.bfloat16, device)
    if reason := why_not(layer) or _expected_waits(layer):
        return Result(check="graph", subject="static", passed=None, detail=reason)
    make_static(layer, size)
    return graph(layer, size, device)


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
        peak_memory(device)
        model(ids)[0].square().mean().backward()
        peaks.append(peak_memory(device))
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    # Not equal bits: attention's backward may add up in any order on a GPU.
    passed = min(map(signal_to_noise, *gradients)) >= LEAST_SNR[torch.float32]
    memory = ""
    if peaks[0] is not None and peaks[1] is not None:
        passed = passed and peaks[1] < peaks[0]
        memory = f", {peaks[1] / GIB:.2f} GiB instead of {peaks[0] / GIB:.2f}"
    detail = f"{'the same gradients' if passed else 'gradients differ, or no less memory'}{memory}"
    return Result(check="offload", subject="4 layers", passed=passed, detail=detail)


def run(
    device: torch.device, *, accuracy_size: Size, speed_size: Size, training_size: Training
) -> list[Result]:
    """All checks."""
    results = [choice(device), offload(device)]
    results += [
        accuracy(accuracy_size, name, dtype, device) for name in NAMES for dtype in LEAST_SNR
    ]
    results += [waiting(accuracy_size, dispatcher, device) for dispatcher in ("local", "static")]
    results.append(replay(accuracy_size, device))
    results += [speed(speed_size, name, device) for name in NAMES]
    results += [
        linear_accuracy(accuracy_size, name, dtype, device)
        for name in get_args(LinearFormat)
        for dtype in LEAST_SNR
    ]
    results += [linear_speed(speed_size, name, device) for name in (None, *get_args(LinearFormat))]
    rate = matmul_rate(training_size.square, device)
    results += [training(training_size, way, device, rate=rate) for way in training_size.ways]
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


@contextmanager
def _waiting_is_an_error(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    synchronize(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print; 1 if something failed or nothing could be checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all results and their numbers")
    options = parser.parse_args(arguments)
    if reason := refusal():
        Console(stderr=True, soft_wrap=True).print(reason)
        return 1
    # The reference is exact; TF32 would make float32 as coarse as 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    results = run(device, accuracy_size=ACCURACY, speed_size=SPEED, training_size=TRAINING)
    seconds = time.perf_counter() - started
    name = torch.cuda.get_device_name()
    title = f"{name}, torch {torch.__version__}, {SPEED}, {seconds:.0f} s"
    console = Console()
    console.width = max(console.width, 150)
    console.print(table(results, title=title))
    if options.json is not None:
        about: dict[str, object] = {"device": name, "torch": torch.__version__, "seconds": seconds}
        about["results"] = [asdict(result) for result in results]
        options.json.write_text(json.dumps(about, indent=1))
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
