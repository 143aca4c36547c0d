"""Training written out by hand, from the formulas of `tests.kit.reference`."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_moe import MoEModule, TokenBatch, TransformerConfig
from tests.kit import reference, reference_model
from tests.kit.runs import GAMMA, LEARNING_RATE, NUM_EXPERTS, Run


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
        logits, routed = reference_model.transformer(batch.ids_BS, weights, config)
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
