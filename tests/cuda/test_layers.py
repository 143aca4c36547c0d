"""One MoE layer on CUDA against the CPU: every backend in every type."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe import MoEConfig, RouterConfig
from lightning_moe.config import FP8Config, LatentMoEConfig, SharedExpertConfig
from lightning_moe.nn import MoE
from tests.cuda.table import row
from tests.cuda.values import Values
from tests.gpu.measure import signal_to_noise

HOPPER, BLACKWELL = torch.device("cuda", 0), torch.device("cuda", 2)
ROUTER = RouterConfig(top_k=2, lb_loss_weight=0.01, z_loss_weight=1e-3)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"shared": SharedExpertConfig(hidden_size=32)},
    "latent": {"latent": LatentMoEConfig(latent_dim=32), "expert_bias": True},
    "gpt_oss": {"activation": "gpt_oss_swiglu", "activation_limit": 7.0},
    "relu2": {"activation": "relu2"},
    "sigmoid groups": {
        "router": replace(
            ROUTER, gating_function="sigmoid", n_group=4, topk_group=2, bias_gamma=1e-3
        )
    },
    "topk_softmax": {"router": replace(ROUTER, gating_function="topk_softmax", bias=True)},
    "score grid": {"router": replace(ROUTER, quantize_scores=True)},
}
BACKENDS = [
    (name, dtype)
    for name in ("torch", "loop", "fp8_rowwise", "mxfp8")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    # Eight-bit experts take no float16.
    if dtype != torch.float16 or name in ("torch", "loop")
]


def results(device: torch.device, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Output and all gradients of one layer."""
    torch.manual_seed(0)
    fp8 = "fp8" in options.get("backend", "")
    emulate = FP8Config(emulate=fp8 and device.type == "cpu")
    config = MoEConfig(
        **({"num_experts": 8, "hidden_size": 64, "router": ROUTER} | options), fp8=emulate
    )
    layer = MoE(64, config, init_std=0.1).to(device, dtype)
    x = torch.randn(4, 16, 64).to(device, dtype).requires_grad_()
    y, record = layer(x)
    loss = y.float().square().mean() + record.logz_squared + record.score_sums_E.square().sum()
    loss.backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad, "y": y.detach()}
    return {name: value.cpu() for name, value in found.items() if value is not None}


def decibels(
    expected: dict[str, Tensor], device: torch.device, dtype: torch.dtype, **options: Any
) -> float:
    """Of the CPU's results over the differences, the worst."""
    with Values():
        found = results(device, dtype, **options)
    assert found.keys() == expected.keys()
    return min(signal_to_noise(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_every_backend_computes_what_it_computes_on_a_cpu(backend: str, dtype: torch.dtype) -> None:
    device = BLACKWELL if backend == "mxfp8" else HOPPER
    expected = results(torch.device("cpu"), dtype, backend=backend)
    found = decibels(expected, device, dtype, backend=backend)
    row(f"layer {backend}, {dtype}".replace("torch.", ""), {}, f"{found:.0f} dB")
    # Sums of eight-bit products are rounded to bfloat16 on a device and not in the emulation.
    assert found > (30 if "fp8" in backend else 100)


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_computes_what_it_computes_on_a_cpu(name: str) -> None:
    expected = results(torch.device("cpu"), torch.bfloat16, **LAYERS[name])
    found = decibels(expected, HOPPER, torch.bfloat16, **LAYERS[name])
    row(f"layer {name}", {}, f"{found:.0f} dB")
    assert found > 100
