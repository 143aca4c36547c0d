"""A check for users: whether the balance losses of their module keep the invariances of their scopes."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import lightning as L
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_moe.config import BALANCE_INVARIANCE
from lightning_moe.nn import MoE, balance_loss, named_moe_layers
from lightning_moe.step.balance_counts import balance_counts
from lightning_moe.step.look_ahead import RoutesAhead
from lightning_moe.step.window import StepWindow

_SPLITS: Final = (2, 4)
_TOLERANCE: Final = (
    1e-9  # in float64; another order of sums moves losses and gradients by 1e-15 or so
)


def assert_balance_invariant(module: L.LightningModule, batch: object) -> str:
    """Check that splitting `batch` into micro-batches changes no balance loss whose scope rules that out.

    The batch stands for the tokens of one optimizer step. For each MoE layer its balance loss, the gradients of that
    loss and the expert counts (which move the expert bias) are computed for the whole batch, and again for 2 and 4
    micro-batches of it, by a float64 copy of the module in evaluation mode, so without noise. `module` itself isn't
    changed. For the scope `lagged` the step before had the same counts.

    >>> import torch
    >>> from lightning_moe import MoEConfig, MoEModule, RouterConfig, TokenBatch, TransformerConfig
    >>> router = RouterConfig(top_k=2, lb_loss_weight=0.01, lb_loss_scope="exact")
    >>> moe = MoEConfig(num_experts=4, hidden_size=8, router=router)
    >>> module = MoEModule(TransformerConfig(vocab_size=11, d_model=8, num_layers=1, moe=moe))
    >>> ids = torch.randint(11, (4, 7))
    >>> print(assert_balance_invariant(module, TokenBatch(ids_BS=ids, labels_BS=ids)))
    model.blocks.0.feed_forward: exact doesn't depend on accumulation and ranks; the same in 2 and 4 micro-batches

    Args:
        module: with a method `routing_step(batch, batch_idx)`, as `MoEModule` has one.
        batch: tensors of which the first dimension counts sequences, at least 2, in any nesting.

    Returns:
        A line per layer: what its scope depends on, and what was found.

    Raises:
        AssertionError: naming layer, scope and difference, if a promise is broken.
        ValueError: if the batch can't be split, or the module has no `routing_step`, no MoE layer, or some of its
            experts only.
    """
    copied = copy.deepcopy(module).double().eval()
    layers = named_moe_layers(copied)
    rows = _check(copied, layers, batch)
    batch = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch
    )
    whole = _step(copied, list(layers.values()), [batch], previous=None)
    previous = tuple(balance.counts for balance in whole)
    whole = _step(copied, list(layers.values()), [batch], previous=previous)
    splits = [number for number in _SPLITS if number <= rows]
    differences = [
        [
            found.difference(expected)
            for found, expected in zip(
                _step(copied, list(layers.values()), _split(batch, number), previous=previous),
                whole,
                strict=True,
            )
        ]
        for number in splits
    ]
    worst = [max(of_layer) for of_layer in zip(*differences, strict=True)]
    text = " and ".join(str(number) for number in splits)
    return "\n".join(
        _verdict(name, layer, difference, text)
        for (name, layer), difference in zip(layers.items(), worst, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class _Balance:
    """Of one layer over a step: loss per token, its gradients, and the copies requested of each expert."""

    loss: Tensor
    gradients: list[Tensor]
    counts: Tensor

    def difference(self, other: "_Balance") -> float:
        """The largest relative difference; infinite where a token was routed elsewhere."""
        if not torch.equal(self.counts, other.counts):
            return float("inf")
        pairs = zip([self.loss, *self.gradients], [other.loss, *other.gradients], strict=True)
        scale = max(g.abs().max().item() for g in (other.loss, *other.gradients))
        return max((a - b).abs().max().item() for a, b in pairs) / max(scale, 1e-30)


def _check(module: L.LightningModule, layers: dict[str, MoE], batch: object) -> int:
    """The number of rows of the batch; a ValueError where the check can't run."""
    if not layers or not isinstance(module, RoutesAhead):
        missing = "a method routing_step(batch, batch_idx)" if layers else "an MoE layer"
        raise ValueError(
            f"assert_balance_invariant needs {type(module).__name__} to have {missing}"
        )
    if any(len(layer.experts.expert_ids) < layer.config.num_experts for layer in layers.values()):
        raise ValueError(
            "assert_balance_invariant runs on one process, and this one holds some of the module's experts only; "
            "call it before fit, or build the module anew with load_from_checkpoint"
        )
    rows = {len(leaf) for leaf in _leaves(batch)}
    if len(rows) != 1 or min(rows) < _SPLITS[0]:
        raise ValueError(
            f"assert_balance_invariant splits a batch along the first dimension of its tensors, which have "
            f"{sorted(rows)} rows; give a batch of equally many sequences everywhere, at least {_SPLITS[0]}"
        )
    return rows.pop()


def _leaves(batch: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _split(batch: object, number: int) -> list[object]:
    def part(i: int) -> object:
        return pytree.tree_map_only(
            Tensor, lambda leaf: leaf.tensor_split(number)[i] if leaf.dim() else leaf, batch
        )

    return [part(i) for i in range(number)]


def _step(
    module: L.LightningModule,
    layers: list[MoE],
    parts: Sequence[object],
    *,
    previous: tuple[Tensor, ...] | None,
) -> list[_Balance]:
    """Each layer's balance over a step of these micro-batches."""
    assert isinstance(module, RoutesAhead)
    window = StepWindow()
    window.scopes.previous = previous
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    losses = [torch.zeros((), dtype=torch.float64) for _ in layers]
    gradients = [[torch.zeros_like(parameter) for parameter in parameters] for _ in layers]

    def counts_from(first: int) -> list[Tensor]:
        totals = [torch.zeros((), dtype=torch.int64) for _ in layers]
        for i, part in enumerate(parts[first:], start=first):
            with torch.no_grad():
                later = module.routing_step(part, i)
            totals = [total + r.requested_E for total, r in zip(totals, later, strict=True)]
        return totals

    for i, part in enumerate(parts):
        records = module.routing_step(part, i)
        counts = balance_counts(
            layers,
            records,
            window,
            all_reduce_sum=lambda tensor: tensor,
            counts_ahead=partial(counts_from, i + 1),
        )
        window.record(records)
        for j, (layer, record, counts_E) in enumerate(zip(layers, records, counts, strict=True)):
            over_scope = replace(record, requested_E=counts_E)
            scope = layer.config.router.lb_loss_scope
            loss = balance_loss([over_scope], scope=scope, reduction="sum")
            found = torch.autograd.grad(
                loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            losses[j] = losses[j] + loss.detach()
            gradients[j] = [a + b for a, b in zip(gradients[j], found, strict=True)]
    return [
        _Balance(loss=loss, gradients=of_layer, counts=window.requested[j])
        for j, (loss, of_layer) in enumerate(zip(losses, gradients, strict=True))
    ]


def _verdict(name: str, layer: MoE, difference: float, splits: str) -> str:
    """A line about one layer.

    Raises:
        AssertionError: if its scope promises more than was found.
    """
    scope = layer.config.router.lb_loss_scope
    promised = BALANCE_INVARIANCE[scope]
    found = (
        f"loss or gradients differ by {difference:.1e} of the largest"
        if math.isfinite(difference)
        else "tokens go to other experts"
    )
    if "accumulation" not in promised:
        kept = " and ".join(promised) or "only expert_parallel and recomputation"
        return f"{name}: {scope} does depend on accumulation (not on: {kept}): in {splits} micro-batches {found}"
    if difference > _TOLERANCE:
        raise AssertionError(
            f"{name}: model.moe.router.lb_loss_scope={scope!r} promises not to depend on accumulation, but in {splits} "
            f"micro-batches {found}; routing_step must treat every sequence by itself"
        )
    return f"{name}: {scope} doesn't depend on {' and '.join(promised)}; the same in {splits} micro-batches"
