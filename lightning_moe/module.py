"""The LightningModule around the MoE transformer."""

import hashlib
import io
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from jaxtyping import Float, Int
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from lightning_moe.callbacks import ExpertLoadMonitor, NonFiniteGuard, RouterBiasCorrection
from lightning_moe.checkpoint.whole import read_whole
from lightning_moe.config import OptimConfig, TransformerConfig, from_mapping, to_mapping
from lightning_moe.data import TokenBatch
from lightning_moe.metrics import TokenMean
from lightning_moe.nn import MoE, MoETransformer, Routing, moe_layers
from lightning_moe.nn.init import draw_seed
from lightning_moe.ops.compiled import compile_refusal
from lightning_moe.ops.cross_entropy import IGNORE_INDEX, ChunkedLoss, chunked_cross_entropy
from lightning_moe.optim import build_optimizer, build_schedule
from lightning_moe.optim.released import refuse_released
from lightning_moe.step import StepHooks, closed_step, step_router_losses
from lightning_moe.strategy import ExpertParallelStrategy
from lightning_moe.strategy.expert_backends import settle_backends
from lightning_moe.strategy.log_step import align_log_step


class MoEModule(StepHooks):
    """Trains an MoE transformer on batches of tokens (`TokenBatch`).

    Cross-entropy and auxiliary losses are summed over tokens, and `StepHooks` divides gradients once per optimizer
    step by all its tokens: they don't depend on accumulation, ranks or padding. A subclass that overrides
    `on_train_start` or a checkpoint hook calls super.

    Logged per optimizer step: `train/loss train/ce train/balance_loss train/z_loss train/lr train/tokens_per_second`,
    by its callbacks `train/grad_norm train/skipped_steps train/load_max_over_mean`; per validation
    `val/ce val/bits_per_byte`. `balance_loss` and `z_loss` are means over layers without weights. All losses are in
    nats.

    Args:
        config: the model, or its mapping.
        optim: optimizer and schedule, or its mapping.
    """

    def __init__(
        self,
        config: TransformerConfig | Mapping[str, object],
        optim: OptimConfig | Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self.config = (
            config
            if isinstance(config, TransformerConfig)
            else from_mapping(TransformerConfig, config)
        )
        optim = OptimConfig() if optim is None else optim
        self.optim = (
            optim if isinstance(optim, OptimConfig) else from_mapping(OptimConfig, optim, "optim")
        )
        self.save_hyperparameters(
            {"config": to_mapping(self.config), "optim": to_mapping(self.optim)}
        )
        self.model = MoETransformer(self.config)
        # A module that is built without memory counts all the same.
        with torch.device("cpu"):
            self.val_ce, self.test_ce = TokenMean(), TokenMean()
        self._has_nominal_tokens = False
        self._tokens_seen = 0
        self._noise_seed = draw_seed()
        self._step_started = 0.0
        self._compiling_since: float | None = None

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[Any],
        *args: Any,
        **kwargs: Any,
    ) -> "MoEModule":
        """Load as Lightning does, also from a folder that several ranks have written; the module has all experts."""
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            checkpoint = read_whole(checkpoint_path, optimizers=False)
            checkpoint_path = io.BytesIO()
            torch.save(checkpoint, checkpoint_path)
            checkpoint_path.seek(0)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def forward(
        self, ids_BS: Int[Tensor, "B S"], document_ids_BS: Int[Tensor, "B S"] | None = None
    ) -> tuple[Float[Tensor, "B S V"], list[Routing]]:
        """Logits of the next token at every position, and one routing record per MoE layer."""
        logits_BSV, records = self.model(ids_BS, document_ids_BS=document_ids_BS)
        return logits_BSV, records

    # ---- steps -----------------------------------------------------------------------------------------------

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Float[Tensor, ""]:
        """Sum of all losses over the labelled tokens, divided by a constant; see `step.StepWindow`."""
        with self._noise_of_batch(0):
            head, records, num_tokens = self._losses(batch)
        if not self._has_nominal_tokens:
            self._set_nominal_tokens(batch)
        total = head.total
        sums = {"ce": head.cross_entropy}
        if records:
            auxiliary = step_router_losses(self, records)
            total = total + auxiliary.total
            sums |= {"balance_loss": auxiliary.balance, "z_loss": auxiliary.z}
        return self.window.add(total, num_tokens, records, {"loss": total, **sums})

    def routing_step(self, batch: TokenBatch, batch_idx: int) -> list[Routing]:
        """The routing records that `training_step` will have of this batch, for the balance scope `exact`."""
        if not self.training:
            return self._features(batch)[1]
        with self._noise_of_batch(batch_idx - self.trainer.fit_loop.batch_idx):
            return self._features(batch)[1]

    def _on_before_batch_transfer(self, batch: object, dataloader_idx: int = 0) -> object:
        """Align the step of the logs before each training batch; Lightning warns of the public hook."""
        if self._trainer is not None and self.trainer.training:
            align_log_step(self.trainer)
        return super()._on_before_batch_transfer(batch, dataloader_idx)

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Add to the validation loss."""
        head, _, num_tokens = self._losses(batch)
        self.val_ce.update(head.cross_entropy, num_tokens)

    def test_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Add to the test loss."""
        head, _, num_tokens = self._losses(batch)
        self.test_ce.update(head.cross_entropy, num_tokens)

    def predict_step(self, batch: TokenBatch, batch_idx: int) -> Float[Tensor, "B S V"]:
        """Logits of the next token at every position, padding included."""
        hidden_BSD, _ = self._features(batch)
        logits_BSV: Tensor = torch.nn.functional.linear(hidden_BSD, self.model.head_weight)
        return logits_BSV

    def on_validation_epoch_end(self) -> None:
        """Log `val/ce` and, where the data knows its bytes, `val/bits_per_byte`."""
        self._log_evaluation("val", self.val_ce)

    def on_test_epoch_end(self) -> None:
        """Log `test/ce` and, where the data knows its bytes, `test/bits_per_byte`."""
        self._log_evaluation("test", self.test_ce)

    def _losses(self, batch: TokenBatch) -> tuple[ChunkedLoss, list[Routing], Tensor]:
        hidden_BSD, records = self._features(batch)
        head = chunked_cross_entropy(
            hidden_BSD.flatten(0, 1),
            self.model.head_weight,
            batch.labels_BS.flatten(),
            z_weight=self.config.lm_z_loss_weight or 0.0,
        )
        return head, records, (batch.labels_BS != IGNORE_INDEX).sum()

    def _features(self, batch: TokenBatch) -> tuple[Tensor, list[Routing]]:
        if not isinstance(batch, TokenBatch):
            raise TypeError(
                f"MoEModule needs batches of type TokenBatch, got {type(batch).__name__}"
            )
        valid_BS = batch.labels_BS != IGNORE_INDEX
        return self.model.features(
            batch.ids_BS, valid_BS=valid_BS, document_ids_BS=batch.document_ids_BS
        )

    def _log_evaluation(self, prefix: str, metric: TokenMean) -> None:
        nats = metric.compute()
        metric.reset()
        # All ranks hold the same value already; without sync_dist Lightning warns that they may not.
        self.log(f"{prefix}/ce", nats, prog_bar=True, sync_dist=True)
        bytes_per_token = getattr(
            getattr(self.trainer, "datamodule", None), "val_bytes_per_token", None
        )
        if bytes_per_token:
            bits = nats / math.log(2) / bytes_per_token
            self.log(f"{prefix}/bits_per_byte", bits, prog_bar=True, sync_dist=True)

    @property
    def moe_layers(self) -> list[MoE]:
        """The MoE layers, in the order of their records."""
        return moe_layers(self.model)

    # ---- one optimizer step ----------------------------------------------------------------------------------

    def _set_nominal_tokens(self, batch: TokenBatch) -> None:
        """Take the size of the first micro-batch of a run, on the rank where it is largest."""
        size = torch.tensor(batch.labels_BS.numel(), device=self.device)
        largest = self.trainer.strategy.reduce(size, reduce_op="max")
        self.window.nominal_tokens = int(largest.item())
        self._has_nominal_tokens = True

    @contextmanager
    def _noise_of_batch(self, ahead: int) -> Iterator[None]:
        """Draw random numbers (router jitter) by seed, batch number and rank only, so that a resumed run repeats them.

        A saved state of the generator would not repeat them: validation and data loaders draw from it as well.

        Args:
            ahead: how many batches after the one in training.
        """
        number = self.trainer.fit_loop.total_batch_idx + ahead
        key = f"{self._noise_seed}/{number}/{self.global_rank}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the step, from sums over all its micro-batches and ranks."""
        statistics = closed_step(self)
        if statistics is None:
            return
        # From the host: Lightning reads what a progress bar shows once per micro-batch, and loggers each value.
        statistics = statistics.on_host()
        self._tokens_seen += int(statistics.num_tokens)
        now = time.perf_counter()
        means = {f"train/{name}": value for name, value in statistics.means().items()}
        self.log("train/loss", means.pop("train/loss"), prog_bar=True)
        self.log(
            "train/tokens_per_second",
            statistics.num_tokens / (now - self._step_started),
            prog_bar=True,
        )
        # As a tensor: of a number Lightning would make one on the device, which waits.
        learning_rate = torch.as_tensor(optimizer.param_groups[0]["lr"])
        self.log_dict({**means, "train/lr": learning_rate})
        self._step_started = now

    def on_train_batch_end(self, outputs: object, batch: TokenBatch, batch_idx: int) -> None:
        """Log how long the first micro-batch took, where blocks are compiled."""
        if self._compiling_since is not None:
            seconds = time.perf_counter() - self._compiling_since
            self._compiling_since = None
            rank_zero_info(
                f"model.compile={self.config.compile}: the first micro-batch took {seconds:.1f} s, "
                "compiling included"
            )

    def on_train_start(self) -> None:
        """Start the clock of the first step."""
        super().on_train_start()
        self._step_started = time.perf_counter()
        self._compiling_since = None if self.config.compile == "none" else self._step_started

    def on_validation_end(self) -> None:
        """Restart the clock of the step, so that validation doesn't count."""
        self._step_started = time.perf_counter()

    # ---- set-up ----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse what can't train here, and count tokens from 0; a resumed fit loads its count after this."""
        spread = any(
            len(layer.experts.expert_ids) < layer.config.num_experts for layer in self.moe_layers
        )
        if spread and not isinstance(self.trainer.strategy, ExpertParallelStrategy):
            raise ValueError(
                "this rank holds some of the module's experts only, left from an earlier fit, and "
                f"{type(self.trainer.strategy).__name__} needs all; use ExpertParallelStrategy again, or build the "
                "module anew with load_from_checkpoint"
            )
        reason = compile_refusal(self.config.compile, self.trainer.strategy.root_device)
        if reason is not None:
            raise ValueError(
                f"model.compile={self.config.compile} can't work here: {reason}; install one, or use "
                "model.compile=none"
            )
        if stage == "fit":
            self._tokens_seen = 0

    def on_fit_start(self) -> None:
        """Choose expert backends and refuse those that can't run here, where no `ExpertParallelStrategy` does so."""
        if not isinstance(self.trainer.strategy, ExpertParallelStrategy):
            refuse_released(self)
            settle_backends(self, self.trainer.precision_plugin)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with groups by role, and the schedule of `optim`."""
        optimizer = build_optimizer(self, self.optim)
        schedule = build_schedule(
            optimizer,
            self.optim,
            run_steps=lambda: self.trainer.estimated_stepping_batches,
            tokens_seen=lambda: self._tokens_seen,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def configure_callbacks(self) -> list[L.Callback]:
        """Bias correction, load logging and the guard against non-finite steps, unless the Trainer has its own."""
        wanted: list[L.Callback] = [NonFiniteGuard(self.optim.max_skipped_steps)]
        if layers := self.moe_layers:
            wanted.append(ExpertLoadMonitor(write_files=False))
            if any(layer.config.router.bias_gamma is not None for layer in layers):
                wanted.append(RouterBiasCorrection())
        given = getattr(self.trainer, "callbacks", [])
        return [new for new in wanted if not any(isinstance(own, type(new)) for own in given)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what a resumed run needs to continue exactly."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_moe"] |= {
            "nominal_tokens": self.window.nominal_tokens if self._has_nominal_tokens else None,
            "tokens_seen": self._tokens_seen,
            "noise_seed": self._noise_seed,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load what `on_save_checkpoint` saved, where the checkpoint is of an `MoEModule`."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lightning_moe", {})
        if "nominal_tokens" in saved:
            self._has_nominal_tokens = saved["nominal_tokens"] is not None
            self.window.nominal_tokens = saved["nominal_tokens"] or 1
            self._tokens_seen = saved["tokens_seen"]
            self._noise_seed = saved["noise_seed"]
