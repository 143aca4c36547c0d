"""Whole optimizer steps of the Trainer on a GPU: tokens per second, memory, share of the matmul rate."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_moe import (
    AttentionConfig,
    ExpertParallelStrategy,
    MoEConfig,
    MoEModule,
    MoEPrecision,
    OptimConfig,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
)
from tests.gpu.measure import GIB, Result, peak_memory, synchronize

WARM_UP: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model, and the micro-batches that train it.

    Attributes:
        rows, length: of a micro-batch.
        accumulate: micro-batches per optimizer step.
        steps: optimizer steps that are timed, after three others.
        square: width of the matmul whose rate is the device's.
        ways: which of `WAYS`.
    """

    model: TransformerConfig
    rows: int
    length: int
    accumulate: int
    steps: int
    square: int
    ways: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all timed steps."""
        return self.rows * self.length * self.accumulate * self.steps


def _strategy(**options: Any) -> Callable[[], dict[str, object]]:
    # One rank sends nothing, so any process group will do; gloo needs no device.
    return lambda: {
        "strategy": ExpertParallelStrategy(process_group_backend="gloo", **options),
        "precision": "bf16-mixed",
    }


WAYS: Final[dict[str, Callable[[], dict[str, object]]]] = {
    "32-true": lambda: {"precision": "32-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    "static": _strategy(dispatcher="static"),
    "compiled": lambda: {"precision": "bf16-mixed"},
    "recomputed": lambda: {"precision": "bf16-mixed"},
    "fp8_rowwise": lambda: {"plugins": [MoEPrecision("fp8_rowwise", base="bf16-mixed")]},
    "mxfp8": lambda: {"plugins": [MoEPrecision("mxfp8", base="bf16-mixed")]},
}
_MODELS: Final[dict[str, dict[str, str]]] = {
    "compiled": {"compile": "inductor"},
    "recomputed": {"recompute": "block"},
}

# 0.5 billion parameters, a tenth of the experts active.
TRAINING: Final = Training(
    model=TransformerConfig(
        vocab_size=32_768,
        d_model=1024,
        num_layers=8,
        attention=AttentionConfig(num_heads=16, num_kv_heads=4),
        moe=MoEConfig(
            num_experts=32,
            hidden_size=512,
            router=RouterConfig(top_k=4, lb_loss_weight=0.01, z_loss_weight=1e-3, bias_gamma=1e-3),
        ),
    ),
    rows=8,
    length=2048,
    accumulate=2,
    steps=5,
    square=8192,
    ways=tuple(WAYS),
)


class _Clock(L.Callback):
    """Seconds and most bytes of the timed steps."""

    def __init__(self, device: torch.device, first_batch: int) -> None:
        self.device, self.first_batch = device, first_batch
        self.started = self.seconds = 0.0
        self.most: int | None = None

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Begin after the steps that warm up."""
        if batch_idx == self.first_batch:
            synchronize(self.device)
            peak_memory(self.device)
            self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are done on the device."""
        synchronize(self.device)
        self.seconds = time.perf_counter() - self.started
        self.most = peak_memory(self.device)


def training(size: Training, way: str, device: torch.device, *, rate: float) -> Result:
    """Train in one of `WAYS`; `rate` is the device's matmul rate in FLOP/s."""
    torch.manual_seed(0)
    module = MoEModule(
        # Names of options with their values, checked by the config itself.
        replace(size.model, **cast(Any, _MODELS.get(way, {}))),
        OptimConfig(schedule="constant", warmup=0),
    )
    clock = _Clock(device, WARM_UP * size.accumulate)
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_steps=WARM_UP + size.steps,
        accumulate_grad_batches=size.accumulate,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **cast(Any, WAYS[way]()),  # options of the Trainer
    )
    try:
        trainer.fit(module, _batches(size), [])
    except ValueError as error:  # what can't run here is refused before the first batch
        return Result(check="training", subject=way, passed=None, detail=str(error))
    per_second = size.tokens / clock.seconds
    share = per_second * size.model.flops_per_token(size.length) / rate
    numbers = {"tokens_per_second": per_second, "share_of_matmul_rate": share}
    memory = ""
    if clock.most is not None:
        numbers["peak_gib"] = clock.most / GIB
        memory = f", {numbers['peak_gib']:.2f} GiB at most"
    return Result(
        check="training",
        subject=way,
        passed=bool(trainer.callback_metrics["train/loss"].isfinite()),
        detail=f"{per_second:,.0f} tokens/s, MFU {100 * share:.1f} % of one large matmul{memory}",
        numbers=numbers,
    )


def _batches(size: Training) -> DataLoader[TokenBatch]:
    generator = torch.Generator().manual_seed(4)
    shape = size.rows, size.length + 1
    made = []
    for _ in range((WARM_UP + size.steps) * size.accumulate):
        ids_BS = torch.randint(size.model.vocab_size, shape, generator=generator)
        made.append(
            TokenBatch(ids_BS=ids_BS[:, :-1].contiguous(), labels_BS=ids_BS[:, 1:].contiguous())
        )
    # Batches are a data set of themselves; mypy knows no lists as such.
    return DataLoader(cast(Any, made), batch_size=None)


def matmul_rate(width: int, device: torch.device) -> float:
    """FLOP/s of the best of some square matmuls in bfloat16: what MFU is a share of."""
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in "ab")
    best = float("inf")
    for _ in range(8):
        synchronize(device)
        started = time.perf_counter()
        left @ right
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * float(width) ** 3 / best
