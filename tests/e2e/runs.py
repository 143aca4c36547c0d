"""Tiny models, batches and Trainers for tests that train, and the same training written out by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe import (
    AttentionConfig,
    MoEConfig,
    MoEModule,
    OptimConfig,
    RouterConfig,
    TokenBatch,
    TransformerConfig,
)
from tests.kit import reference

VOCAB_SIZE = 11
SEQUENCE_LENGTH = 8
NUM_EXPERTS = 4
LEARNING_RATE = 0.3
GAMMA = 1e-3
NOT_REPEATABLE = "train/tokens_per_second"


def tiny_config(
    *, recompute: str = "none", tie_embeddings: bool = False, **router: object
) -> TransformerConfig:
    """Two MoE layers of width 16; keywords go to the router."""
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        num_layers=2,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(
            num_experts=NUM_EXPERTS,
            hidden_size=12,
            router=RouterConfig(**({"top_k": 2} | router)),
        ),
        # Large weights: every loss, count and gradient is then far from its value for even routing.
        init_std=0.4,
        tie_embeddings=tie_embeddings,
        recompute=recompute,
    )


class SgdModule(MoEModule):
    """Plain gradient descent: a wrong factor on a gradient shows in the weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_module(
    config: TransformerConfig,
    kind: type[MoEModule] = SgdModule,
    optim: OptimConfig | None = None,
    seed: int = 3,
) -> MoEModule:
    """A module whose weights depend on `seed` only."""
    torch.manual_seed(seed)
    return kind(config, optim)


def make_batches(row_lengths: Iterable[Sequence[int]], seed: int = 5) -> list[TokenBatch]:
    """One batch per entry, with one row per number: how many of its first labels count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for lengths in row_lengths:
        shape = (len(lengths), SEQUENCE_LENGTH + 1)
        tokens = torch.randint(VOCAB_SIZE, shape, generator=generator)
        labels_BS = tokens[:, 1:].clone()
        for row, length in enumerate(lengths):
            labels_BS[row, length:] = -100
        batches.append(TokenBatch(ids_BS=tokens[:, :-1].contiguous(), labels_BS=labels_BS))
    return batches


def _as_is(batch: TokenBatch) -> TokenBatch:
    return batch


def make_loader(batches: list[TokenBatch]) -> DataLoader[TokenBatch]:
    """The batches in their order."""
    return DataLoader(batches, batch_size=None, collate_fn=_as_is)


def make_trainer(folder: Path, **options: object) -> L.Trainer:
    """A quiet Trainer on the CPU."""
    defaults: dict[str, Any] = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**(defaults | options))


class History(L.Callback):
    """What was logged at each optimizer step, as numbers."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        metrics = trainer.callback_metrics
        self.steps.append(
            {
                name: value.item()
                for name, value in metrics.items()
                if name.startswith("train/") and name != NOT_REPEATABLE
            }
        )


@dataclass
class Run:
    """What a training left behind."""

    weights: dict[str, Tensor]
    steps: list[dict[str, float]]
    num_steps: int


def run(folder: Path, module: MoEModule, batches: list[TokenBatch], **options: object) -> Run:
    """Fit in float64, unless told otherwise; validation runs before, and after every epoch."""
    history = History()
    callbacks = [history, *options.pop("callbacks", [])]
    trainer = make_trainer(folder, **({"precision": "64-true"} | options), callbacks=callbacks)
    trainer.fit(module, make_loader(batches), make_loader(make_batches([(8, 3)], seed=99)))
    weights = {name: value.clone() for name, value in module.model.state_dict().items()}
    return Run(weights, history.steps, trainer.global_step)


def train_losses(
    batches: list[TokenBatch],
    folder: Path,
    module: L.LightningModule,
    ckpt_path: str | None = None,
    **options: object,
) -> list[float]:
    """`train/loss` of every step; the first batch serves to validate as well."""
    history = History()
    trainer = make_trainer(folder, callbacks=[history], **options)
    trainer.fit(module, make_loader(batches), make_loader(batches[:1]), ckpt_path=ckpt_path)
    return [step["train/loss"] for step in history.steps]


def train_by_hand(
    module: MoEModule, steps: Iterable[Sequence[TokenBatch]], *, scope: str = "sequence"
) -> Run:
    """Gradient descent on all rows of a step at once, from the formulas of tests/kit/reference.py.

    Args:
        module: where the weights come from; it is left alone.
        steps: the batches of each optimizer step, over all ranks.
        scope: what the balance loss takes its expert counts from; `micro_batch` is one of the batches.
    """
    weights = {
        name: value.detach().clone() if name.endswith("score_bias") else value.detach().double()
        for name, value in module.model.state_dict().items()
    }
    logged = []
    previous: list[list[int]] | None = None
    for batches in steps:
        leaves = {n: w.clone().requires_grad_(w.dtype == torch.float64) for n, w in weights.items()}
        means, counts = _losses(leaves, batches, module.config, (scope, previous))
        previous = counts
        means["train/loss"].backward()
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                weights[name] = weights[name] - LEARNING_RATE * leaf.grad
        assert module.config.moe is not None
        _move_biases(weights, counts, centered=module.config.moe.router.bias_centering)
        logged.append({name: value.item() for name, value in means.items()})
    return Run(weights, logged, len(logged))


def _move_biases(weights: dict[str, Tensor], counts: list[list[int]], *, centered: bool) -> None:
    biases = [name for name in weights if name.endswith("score_bias")]
    for name, of_layer in zip(biases, counts, strict=False):
        mean = sum(of_layer) / len(of_layer)
        signs = [(mean > count) - (mean < count) for count in of_layer]
        weights[name] = weights[name] + GAMMA * torch.tensor(signs)
        if centered:
            mean_of_bias = sum(weights[name].tolist()) / len(of_layer)
            weights[name] = (weights[name].double() - mean_of_bias).float()


def _losses(
    weights: dict[str, Tensor],
    batches: Sequence[TokenBatch],
    config: TransformerConfig,
    scope: tuple[str, list[list[int]] | None],
) -> tuple[dict[str, Tensor], list[list[int]]]:
    assert config.moe is not None
    options = config.moe.router
    num_layers = config.num_layers
    ce = torch.zeros((), dtype=torch.float64)
    z = [ce.clone() for _ in range(num_layers)]
    # By layer, micro-batch and sequence: chosen ids and scores.
    chosen: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in range(num_layers)]
    counts = [[0] * NUM_EXPERTS for _ in range(num_layers)]
    num_tokens = sum(int((batch.labels_BS != -100).sum()) for batch in batches)
    for batch in batches:
        logits, routed = reference.transformer(batch.ids_BS, weights, config)
        ce = ce + reference.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten())
        valid = batch.labels_BS != -100
        for layer in range(num_layers):
            rows = [
                (
                    decision[layer].ids[mask],
                    decision[layer].shares[mask],
                    decision[layer].logz[mask],
                )
                for decision, mask in zip(routed, valid, strict=True)
            ]
            chosen[layer].append([(ids, shares) for ids, shares, _ in rows])
            z[layer] = z[layer] + sum((logz**2).sum() for _, _, logz in rows)
            for ids, _, _ in rows:
                for expert, copies in enumerate(reference.count(ids, NUM_EXPERTS)):
                    counts[layer][expert] += copies
    orthogonality = sum(
        reference.orthogonality_loss(weights[f"blocks.{layer}.feed_forward.router.weight"])
        for layer in range(num_layers)
    )
    name, previous = scope
    balance = [
        _balance(name, rows_of_batch, None if previous is None else previous[layer])
        for layer, rows_of_batch in enumerate(chosen)
    ]
    divisor = max(num_tokens, 1)
    total = (
        ce
        + (options.lb_loss_weight or 0.0) * sum(balance)
        + (options.z_loss_weight or 0.0) * sum(z)
    ) / divisor + (options.orth_loss_weight or 0.0) * orthogonality
    means = {
        "train/loss": total,
        "train/ce": ce / divisor,
        "train/balance_loss": sum(balance) / num_layers / divisor,
        "train/z_loss": sum(z) / num_layers / divisor,
    }
    busiest = [max(layer) * NUM_EXPERTS / max(sum(layer), 1) for layer in counts]
    means |= {"train/load_max_over_mean": torch.tensor(max(busiest), dtype=torch.float64)}
    return means, counts


def _balance(
    scope: str, batches: list[list[tuple[Tensor, Tensor]]], previous: list[int] | None
) -> Tensor:
    """Sum over tokens of one layer's balance loss: E * sum_e (share of copies sent to e) * (score of e)."""
    if scope == "sequence":
        batches = [[row] for rows in batches for row in rows]
    own = []
    for rows in batches:
        ids = torch.cat([ids for ids, _ in rows])
        own.append([ids.flatten().tolist().count(expert) for expert in range(NUM_EXPERTS)])
    so_far = [[sum(counts) for counts in zip(*own[: i + 1], strict=True)] for i in range(len(own))]
    total = torch.zeros((), dtype=torch.float64)
    for i, rows in enumerate(batches):
        counts = {
            "sequence": own[i],
            "micro_batch": own[i],
            "accumulated": so_far[i],
            "lagged": own[i] if previous is None else previous,
            "exact": so_far[-1],
        }[scope]
        for expert, copies in enumerate(counts):
            share = copies / max(sum(counts), 1)
            total = total + NUM_EXPERTS * share * sum(s[:, expert].sum() for _, s in rows)
    return total


def assert_same(got: Run, expected: Run, *, tolerance: float = 1e-12) -> None:
    """Weights, biases, number of steps, and everything `expected` logged."""
    assert got.num_steps == expected.num_steps
    torch.testing.assert_close(got.weights, expected.weights, rtol=tolerance, atol=tolerance)
    assert len(got.steps) == len(expected.steps)
    for ours, theirs in zip(got.steps, expected.steps, strict=True):
        named = {name: ours[name] for name in theirs}
        torch.testing.assert_close(named, theirs, rtol=tolerance, atol=tolerance)
