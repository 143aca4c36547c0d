"""Which expert backends wait for the device, which devices they run on, and what refuses wrong calls."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.config import FP8Config
from lightning_moe.nn import MLP, MoE
from lightning_moe.precision import LinearRecipe
from tests.cuda.table import row
from tests.cuda.values import Values
from tests.cuda.waits import HostWaits

DEVICES = [torch.device("cuda", i) for i in (0, 2, 3, 4, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _layer(device: torch.device, dtype: torch.dtype, backend: str, fp8: FP8Config) -> MoE:
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=4, hidden_size=64, backend=backend, fp8=fp8, router=RouterConfig(top_k=2)
    )
    return MoE(64, config).to(device, dtype)


def _name(device: torch.device) -> str:
    return ".".join(str(number) for number in torch.cuda.get_device_capability(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "emulate"),
    [
        ("torch", False),
        ("loop", False),
        ("fp8_rowwise", False),
        ("fp8_rowwise", True),
        ("mxfp8", False),
        ("mxfp8", True),
    ],
)
def test_backends_wait_as_often_as_they_say_and_run_wherever_they_are_not_refused(
    backend: str, dtype: torch.dtype, emulate: bool
) -> None:
    fp8 = FP8Config(emulate=emulate)
    said: dict[str, Any] = {}
    for device in DEVICES:
        layer = _layer(device, dtype, backend, fp8)
        sizes = layer.experts.sizes()
        try:
            settled = layer.experts.backend.settle(sizes)
        except ValueError:
            said[_name(device)] = "refused"
            continue
        x = torch.randn(12, 64).to(device, dtype).requires_grad_()
        with Values(), HostWaits("lightning_moe") as waits:
            y, _ = layer(x)
            y.sum().backward()
        assert waits.total() == settled.host_waits(sizes), waits.by_name()
        said[_name(device)] = waits.total()
    by_device = ", ".join(f"{name}: {number}" for name, number in said.items())
    row(f"waits of {backend}{' emulated' * emulate}, {dtype}".replace("torch.", ""), {}, by_device)
    takes_type = backend in ("torch", "loop") or dtype != torch.float16
    assert any(isinstance(number, int) for number in said.values()) == takes_type


def run_linears(linears: str) -> list[str]:
    """Forward and backward of a converted MLP on all devices that don't refuse it: their capabilities."""
    recipe, ran = LinearRecipe(name=linears), []
    for device in map(torch.device, range(torch.cuda.device_count())):
        if recipe.refusal(torch.bfloat16, device) is None:
            mlp = MLP(64, 64).to(device, torch.bfloat16)
            for name, linear in list(mlp.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(mlp, name, recipe.convert(linear))
            x = torch.randn(32, 64).to(device, torch.bfloat16).requires_grad_()
            with torch.cuda.device(device):
                mlp(x).sum().backward()
            ran.append(_name(device))
    return ran


@pytest.mark.parametrize(
    ("linears", "capabilities"),
    [
        ("fp8_tensorwise", ["8.9", "9.0", "10.0", "12.0"]),
        ("fp8_rowwise", ["9.0", "10.0", "12.0"]),
        ("mxfp8", ["10.0", "10.3", "12.0"]),
    ],
)
def test_linear_layers_in_eight_bits_run_wherever_they_are_not_refused(
    linears: str, capabilities: list[str]
) -> None:
    """In a process of its own: torchao decides by the first device while it is imported."""
    script = f"from tests.cuda.test_backends import run_linears; print(*run_linears({linears!r}))"
    environment = os.environ | {"RUNTIME_CAPABILITIES": ",".join([*capabilities, "8.0"])}
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == capabilities
    row(f"linears {linears}", {}, f"ran on {', '.join(capabilities)}")
