"""Faults planted into the package, each of which a check here must notice."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe.nn import expert_backends, transformer
from lightning_moe.nn.router import Router
from lightning_moe.ops import grouped_mm
from lightning_moe.ops.expert_backend import MatmulBackend
from lightning_moe.precision import scaled_mm
from tests.cuda.test_layers import BLACKWELL, HOPPER, decibels, results
from tests.cuda.trained import Case, train

# A function and an operator of that name: the module must be asked for by its path.
top_experts = importlib.import_module("lightning_moe.ops.top_experts")

Change = Callable[[Any, str, object], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Replace an attribute, or an entry of a mapping, until the test ends."""

    def change(owner: Any, name: str, value: object) -> None:
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, value)
        else:
            monkeypatch.setattr(owner, name, value)

    return change


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, dict[str, Tensor]]:
    """What is right, from before any fault."""
    cpu = torch.device("cpu")
    return {name: results(cpu, torch.bfloat16, backend=name) for name in ("torch", "mxfp8")}


def _worst(backend: str, on_cpu: dict[str, dict[str, Tensor]]) -> float:
    device = BLACKWELL if backend == "mxfp8" else HOPPER
    return decibels(on_cpu[backend], device, torch.bfloat16, backend=backend)


def test_without_a_fault_numbers_are_right(on_cpu: dict[str, dict[str, Tensor]]) -> None:
    assert _worst("torch", on_cpu) > 100
    assert _worst("mxfp8", on_cpu) > 30


def test_scale_tiles_in_another_order_are_noticed(
    plant: Change, on_cpu: dict[str, dict[str, Tensor]]
) -> None:
    right = scaled_mm.tiled_scales
    plant(scaled_mm, "tiled_scales", lambda scales, counts: right(scales, counts).flip(0))
    assert _worst("mxfp8", on_cpu) < 20


def test_a_wrong_choice_of_experts_on_cuda_alone_is_noticed(
    plant: Change, on_cpu: dict[str, dict[str, Tensor]]
) -> None:
    right = top_experts._top_by_unique_keys
    plant(top_experts, "_top_by_unique_keys", lambda s, k: s.shape[1] - 1 - right(s, k))
    assert _worst("torch", on_cpu) < 10


def _with_int64(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm._TorchGroupedMatmul.apply(rows, weight, counts.cumsum(0))


def _with_counts_of_cpu(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_mm.torch_grouped_mm(rows, weight, counts.cpu())


@pytest.mark.parametrize(
    ("matmul", "said"), [(_with_int64, "int32"), (_with_counts_of_cpu, "on the same device")]
)
def test_offsets_of_the_wrong_type_or_place_are_refused(
    matmul: Callable[..., Tensor],
    said: str,
    plant: Change,
    on_cpu: dict[str, dict[str, Tensor]],
) -> None:
    backend = MatmulBackend(matmul, lambda _: None)
    plant(expert_backends.EXPERT_BACKENDS, "torch", lambda _: backend)
    with pytest.raises(RuntimeError, match=said):
        _worst("torch", on_cpu)


def test_a_tensor_made_on_the_wrong_device_is_refused(plant: Change) -> None:
    right = transformer.rope_angles
    plant(transformer, "rope_angles", lambda positions, *rest: right(positions.cpu(), *rest))
    with pytest.raises(RuntimeError, match="same device"):
        train(Case(), "gpu")


def test_an_added_item_is_noticed_with_its_place(plant: Change) -> None:
    right = Router._choose

    def _choose(router: Router, selection: Tensor) -> Tensor:
        selection.sum().item()
        return right(router, selection)

    before = train(Case(), "gpu")
    plant(Router, "_choose", _choose)
    after = train(Case(), "gpu")
    # Two micro-batches of two layers.
    assert sum(after.waits.values()) == sum(before.waits.values()) + 4
    new = {name: n for name, n in after.waits.items() if n != before.waits.get(name)}
    assert new == {"nn/router.py:forward": 4}
