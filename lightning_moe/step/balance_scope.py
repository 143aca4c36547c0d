"""Where the balance loss takes its expert counts from: a micro-batch, the optimizer step, or the one before."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor
from torch.optim import LBFGS

from lightning_moe.nn import MoE, Routing, moe_layers
from lightning_moe.nn.router_losses import RouterLosses, router_losses
from lightning_moe.step.look_ahead import batches_ahead
from lightning_moe.step.window import StepWindow, refuse_unclosed, window_of


@runtime_checkable
class RoutesAhead(Protocol):
    """What the scope `exact` asks of a module."""

    def routing_step(self, batch: object, batch_idx: int) -> Sequence[Routing]:
        """One record per MoE layer, from the forward that `training_step` does with this batch, noise included."""
        ...


def step_router_losses(module: L.LightningModule, records: Sequence[Routing]) -> RouterLosses:
    """`nn.router_losses` of the module's MoE layers at any balance scope, in the optimizer step in progress.

    For `training_step`, once per micro-batch and before it adds to its window:

        auxiliary = step_router_losses(self, records)
        return self.window.add(loss_sum + auxiliary.total, num_tokens, records)

    Counts that go over ranks do so in one message for all layers. `accumulated`, `lagged` and `exact` need
    `self.window = StepWindow()`. `exact` also needs a method `routing_step(batch, batch_idx)`, which gives the
    records of `training_step` again; it is called without gradients for the micro-batches that the step has still to
    come, starting from the same random numbers, with copies of these and of the buffers (running means).

    Args:
        module: in the middle of a `training_step`.
        records: one per MoE layer, in the order of `module.modules()`.

    Raises:
        ValueError: if there isn't one record per layer, the module lacks what a scope needs, or `lagged` meets LBFGS.
        RuntimeError: outside of training, or if the step before was never closed, the micro-batch before never
            added, or `exact` can't look ahead.
    """
    layers = moe_layers(module)
    if len(layers) != len(records):
        raise ValueError(
            f"{len(records)} routing records for {len(layers)} MoE layers; pass one record per layer"
        )
    counts = balance_counts(
        layers,
        records,
        _needed_window(module, layers),
        all_reduce_sum=lambda tensor: module.trainer.strategy.reduce(tensor, reduce_op="sum"),
        counts_ahead=lambda: _counts_ahead(module, len(layers)),
    )
    return router_losses(layers, records, counts)


def balance_counts(
    layers: Sequence[MoE],
    records: Sequence[Routing],
    window: StepWindow,
    *,
    all_reduce_sum: Callable[[Tensor], Tensor],
    counts_ahead: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """Per layer, the token copies asked of each expert over the tokens of its balance scope.

    Args:
        layers: the MoE layers.
        records: one per layer, of this micro-batch.
        window: the micro-batches before it.
        all_reduce_sum: sum over all ranks; called at most once, for all layers.
        counts_ahead: per layer, the counts of the step's later micro-batches on this rank; called at most once per
            step, on all ranks or on none.
    """
    counts = [record.requested_E for record in records]
    foreseen = window.foreseen
    local: dict[int, Tensor] = {}
    ahead: list[Tensor] | None = None
    for i, layer in enumerate(layers):
        scope = layer.config.router.lb_loss_scope
        if scope == "global_micro_batch" or (scope == "lagged" and window.previous is None):
            local[i] = counts[i]
        elif scope == "accumulated":
            local[i] = counts[i] + window.requested_so_far(i)
        elif scope == "exact" and i not in foreseen:
            ahead = counts_ahead() if ahead is None else ahead
            local[i] = counts[i] + ahead[i]
        elif scope == "exact":
            counts[i] = foreseen[i]
        elif scope == "lagged":
            counts[i] = window.requested_before(i, like=counts[i])
    if local:
        sizes = [part.numel() for part in local.values()]
        sums = all_reduce_sum(torch.cat(list(local.values()))).split(sizes)
        for i, total in zip(local, sums, strict=True):
            counts[i] = total
    window.foreseen = {
        i: counts[i]
        for i, layer in enumerate(layers)
        if layer.config.router.lb_loss_scope == "exact"
    }
    return counts


def _needed_window(module: L.LightningModule, layers: Sequence[MoE]) -> StepWindow:
    """The module's window; an empty one where none is there and no scope needs it."""
    window = window_of(module)
    scopes = {layer.config.router.lb_loss_scope for layer in layers}
    beyond = sorted(scopes & {"accumulated", "lagged", "exact"})
    if window is None and beyond:
        raise ValueError(
            f"model.moe.router.lb_loss_scope={beyond[0]!r} needs the counts of a whole optimizer step; create "
            f"`self.window = StepWindow()` in {type(module).__name__} and call `self.window.add(...)`, or "
            "`self.window.record(...)`, in training_step"
        )
    if "exact" in scopes and not isinstance(module, RoutesAhead):
        raise ValueError(
            f"model.moe.router.lb_loss_scope='exact' needs {type(module).__name__} to have a method "
            "routing_step(batch, batch_idx) that gives the routing records of a batch; write one, or choose "
            "accumulated or lagged"
        )
    # Outside of a Trainer nothing steps.
    if window is not None and module._trainer is not None and module.trainer.training:
        refuse_unclosed(module, counts_matter=bool(beyond))
    if window is not None and beyond:
        if not module.trainer.training:
            raise RuntimeError(
                f"model.moe.router.lb_loss_scope={beyond[0]!r} is about optimizer steps: call step_router_losses in "
                "training_step only; elsewhere `nn.balance_loss(records)` tells the balance of a batch"
            )
        if "lagged" in scopes and any(isinstance(o, LBFGS) for o in module.trainer.optimizers):
            raise ValueError(
                "model.moe.router.lb_loss_scope='lagged' can't work with LBFGS, which calls training_step several "
                "times in an optimizer step, each lagging behind the call before; choose another scope or optimizer"
            )
        if window.awaits:
            raise RuntimeError(
                f"model.moe.router.lb_loss_scope={beyond[0]!r} needs every micro-batch of a step, and the one before "
                "was not added: after step_router_losses, call `self.window.add(...)` or `self.window.record(...)` "
                "with the same records"
            )
        window.awaits = len(layers)
    return StepWindow() if window is None else window


def _counts_ahead(module: L.LightningModule, num_layers: int) -> list[Tensor]:
    """Per layer, what the step's later micro-batches will ask of each expert: 0 where none are to come."""
    assert isinstance(module, RoutesAhead)
    batches = batches_ahead(module)
    first = module.trainer.fit_loop.batch_idx + 1
    totals: list[Tensor] = [torch.zeros((), dtype=torch.int64, device=module.device)] * num_layers
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), _copied_buffers(module):
        for batch_idx, batch in enumerate(batches, start=first):
            records = module.routing_step(batch, batch_idx)
            totals = [
                total + record.requested_E for total, record in zip(totals, records, strict=True)
            ]
    return totals


@contextmanager
def _copied_buffers(module: L.LightningModule) -> Iterator[None]:
    """Forwards write to copies of the buffers: a batch norm would see every batch twice."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in buffers}
    for owner, name, buffer in buffers:
        owner._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
