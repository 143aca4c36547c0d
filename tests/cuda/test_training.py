"""Whole Trainer runs on CUDA without a device, on one rank, whose numbers equal the CPU's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_moe import AttentionConfig, ExpertParallelStrategy, MoEPrecision
from lightning_moe.config import FP8Config, LatentMoEConfig
from tests.cuda.table import row
from tests.cuda.trained import COMPARED, Case, moe, router, train

FLOAT32 = {"precision": "32-true"}
EMULATED = FP8Config(emulate=True)


def strategy(**options: Any) -> dict[str, Callable[[], ExpertParallelStrategy]]:
    """Of the Trainer: ranks that talk by gloo, since NCCL needs devices."""
    return {"strategy": lambda: ExpertParallelStrategy(process_group_backend="gloo", **options)}


def plugin(**options: Any) -> dict[str, Callable[[], list[MoEPrecision]]]:
    """Of the Trainer: `MoEPrecision` with these options."""
    return {"plugins": lambda: [MoEPrecision(**options)]}


def eight_bits(**options: Any) -> Case:
    """A plugin whose matmuls are emulated on the CPU."""
    return Case(trainer=plugin(**options), on_cpu=Case(trainer=plugin(**options, emulate=True)))


CASES: dict[str, Case] = {
    "float32": Case(trainer=FLOAT32),
    "float32, static": Case(trainer=FLOAT32 | strategy(dispatcher="static")),
    "float32, loop": Case(moe(backend="loop"), trainer=FLOAT32),
    "float32, latent, biases": Case(
        moe(latent=LatentMoEConfig(latent_dim=32), expert_bias=True), trainer=FLOAT32
    ),
    "float32, sigmoid, groups": Case(
        moe(
            router=router(
                gating_function="sigmoid",
                n_group=4,
                topk_group=2,
                bias_gamma=1e-3,
                bias_centering=True,
                quantize_scores=True,
                orth_loss_weight=0.01,
            )
        ),
        trainer=FLOAT32,
    ),
    "float32, topk_softmax": Case(
        moe(router=router(gating_function="topk_softmax", bias=True, lb_loss_scope="sequence")),
        trainer=FLOAT32,
    ),
    "float32, jitter": Case(moe(router=router(jitter_eps=0.01)), trainer=FLOAT32),
    "float32, random": Case(
        moe(router=router(random_expert_assignment=True, lb_loss_weight=None)), trainer=FLOAT32
    ),
    "float32, exact": Case(moe(router=router(lb_loss_scope="exact")), trainer=FLOAT32),
    "float32, lagged": Case(moe(router=router(lb_loss_scope="lagged")), trainer=FLOAT32),
    "float32, accumulated": Case(
        moe(router=router(lb_loss_scope="accumulated")), trainer=FLOAT32 | strategy()
    ),
    "float32, gpt_oss": Case(
        moe(activation="gpt_oss_swiglu", activation_limit=7.0), trainer=FLOAT32
    ),
    "float32, window": Case(
        {"attention": AttentionConfig(num_heads=4, num_kv_heads=2, sliding_window=8)},
        trainer=FLOAT32,
    ),
    "float32, dense layer": Case({"num_dense_layers": 1, "dense_hidden_size": 96}, trainer=FLOAT32),
    "float32, recompute block": Case({"recompute": "block"}, trainer=FLOAT32),
    "float32, recompute moe, offload": Case(
        {"recompute": "moe", "offload_activations": True}, trainer=FLOAT32
    ),
    "float32, offload": Case({"offload_activations": True}, trainer=FLOAT32),
    "float32, head z-loss": Case({"lm_z_loss_weight": 1e-3}, trainer=FLOAT32),
    "float32, steps of tokens": Case(trainer=FLOAT32, optim={"unit": "tokens", "warmup": 100}),
    "bf16-mixed": Case(),
    "bf16-mixed, strategy": Case(trainer=strategy()),
    "bf16-mixed, static": Case(trainer=strategy(dispatcher="static")),
    "bf16-mixed, loop": Case(moe(backend="loop")),
    "bf16-mixed, aot_eager": Case({"compile": "aot_eager"}),
    "bf16-true": Case(trainer={"precision": "bf16-true"}),
    "16-mixed": Case(trainer={"precision": "16-mixed"}, on_cpu=Case(trainer=FLOAT32)),
    "fp8_rowwise": eight_bits(experts="fp8_rowwise", base="bf16-mixed"),
    "fp8_rowwise, float32": eight_bits(experts="fp8_rowwise", base="32-true"),
    "fp8_rowwise, linears": eight_bits(
        experts="fp8_rowwise", base="bf16-mixed", linears="fp8_rowwise"
    ),
    "linears fp8_tensorwise": eight_bits(base="bf16-mixed", linears="fp8_tensorwise"),
    "mxfp8": replace(eight_bits(experts="mxfp8", base="bf16-mixed"), device=2),
    "fp8_only": Case(
        moe(backend="fp8_rowwise", fp8=FP8Config(fp8_only=True)),
        trainer=strategy(),
        on_cpu=Case(moe(backend="fp8_rowwise", fp8=EMULATED)),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao
@pytest.mark.parametrize("name", CASES)
def test_training_on_cuda_gives_the_numbers_of_the_cpu(name: str) -> None:
    case = CASES[name]
    expected, found = train(case, "cpu"), train(case, "gpu")
    numbers = {key: (found.metrics[key], expected.metrics[key]) for key in COMPARED}
    row(name, numbers, f"waits {found.by_batch}")
    # Autocast keeps other operators in float32 on CUDA than on a CPU; in float32 both compute the same.
    relative = 1e-5 if name.startswith("float32") else 1e-2
    for key, (ours, cpu) in numbers.items():
        assert ours == pytest.approx(cpu, rel=relative), key
