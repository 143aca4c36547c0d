"""What of the GPU checks runs anywhere: they find faults, say what they skip and refuse to run without a GPU."""

import io
import math

import pytest
import torch
from rich.console import Console

from lightning_moe import AttentionConfig, MoEConfig, RouterConfig, TransformerConfig
from tests.gpu import check, measure
from tests.gpu.training import Training

CPU = torch.device("cpu")
TINY = check.Size(tokens=24, width=32, hidden=16, experts=4, top_k=2)
SHORT = Training(
    model=TransformerConfig(
        vocab_size=16,
        d_model=16,
        num_layers=1,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=4, hidden_size=16, router=RouterConfig(top_k=2)),
    ),
    rows=1,
    length=8,
    accumulate=2,
    steps=1,
    square=16,
    ways=("bf16-mixed", "static", "fp8_rowwise"),
)


def test_signal_to_noise_by_hand() -> None:
    signal = torch.tensor([3.0, 4.0])
    assert measure.signal_to_noise(torch.tensor([3.0, 4.5]), signal) == pytest.approx(20.0)
    assert measure.signal_to_noise(signal, signal) == math.inf
    assert measure.signal_to_noise(torch.ones(2), torch.zeros(2)) == -math.inf
    assert math.isnan(measure.signal_to_noise(torch.tensor([math.nan, 4.0]), signal))


def test_all_checks_run_on_a_cpu_pass_or_say_why_they_were_skipped() -> None:
    results = check.run(CPU, accuracy_size=TINY, speed_size=TINY, training_size=SHORT)
    assert not [result for result in results if result.passed is False]
    by_subject = {(result.check, result.subject): result for result in results}
    assert by_subject["accuracy", "torch, bfloat16"].passed
    assert by_subject["accuracy", "loop, float32"].passed
    assert by_subject["speed", "linears bfloat16"].passed
    assert by_subject["training", "static"].numbers["tokens_per_second"] > 0
    refused = by_subject["accuracy", "linears fp8_rowwise, bfloat16"]
    assert refused.passed is None
    assert "MoEPrecision linears=fp8_rowwise can't work here" in refused.detail
    skipped = by_subject["speed", "mxfp8"]
    assert skipped.passed is None
    assert "model.moe.backend=mxfp8 can't run these experts" in skipped.detail
    assert by_subject["training", "fp8_rowwise"].passed is None
    assert by_subject["graph", "static"].passed is None
    console = Console(file=io.StringIO(), width=150)
    console.print(check.table(results, title="here"))
    printed = console.file.getvalue()
    for word in ("here", "passed", "skipped", "TFLOP/s", "dB at worst"):
        assert word in printed


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.step

    def wrong(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> object:
        result = right(layer, x, gradient)
        if x.dtype == torch.bfloat16:
            result["experts.w_down"] = -result["experts.w_down"]
        return result

    monkeypatch.setattr(measure, "step", wrong)
    found = check.accuracy(TINY, "torch", torch.bfloat16, CPU)
    assert found.passed is False
    assert "-6 dB at worst (experts.w_down), 35 needed" in found.detail


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_linear_layers_in_eight_bits_are_near_enough_to_float64(name: str) -> None:
    size = check.Size(tokens=48, width=32, hidden=16, experts=4, top_k=2)
    found = check.linear_accuracy(size, name, torch.bfloat16, CPU, emulate=True)
    assert found.passed, found.detail


def test_without_a_gpu_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 1
    assert "needs a CUDA device, and torch sees none here" in capsys.readouterr().err
