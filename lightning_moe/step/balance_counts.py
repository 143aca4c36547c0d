"""The expert counts in the balance loss of each scope: of a micro-batch, the optimizer step, or the step before."""

from collections.abc import Callable, Sequence

import lightning as L
import torch
from torch import Tensor
from torch.optim import LBFGS

from lightning_moe.nn import MoE, Routing, moe_layers
from lightning_moe.nn.router_losses import RouterLosses, router_losses
from lightning_moe.step.hooks import close_steps
from lightning_moe.step.look_ahead import RoutesAhead, requested_ahead
from lightning_moe.step.window import StepWindow, window_of


def step_router_losses(module: L.LightningModule, records: Sequence[Routing]) -> RouterLosses:
    """`nn.router_losses` of the module's MoE layers at any balance scope, in the optimizer step in progress.

    For `training_step`, once per micro-batch and before it adds to its window:

        auxiliary = step_router_losses(self, records)
        return self.window.add(loss_sum + auxiliary.total, num_tokens, records)

    Counts that go over ranks do so in one message for all layers. `accumulated`, `lagged` and `exact` need a window,
    which `StepHooks` has, and the step is closed as under `StepHooks`. `exact` also needs a method
    `routing_step(batch, batch_idx)`, which gives the records of `training_step` again; it is called without gradients
    for the later micro-batches of the step, starting from the same random numbers, with copies of these and of the
    buffers (running means).

    Args:
        module: in the middle of a `training_step`.
        records: one per MoE layer, in the order of `module.modules()`.

    Raises:
        ValueError: if there isn't one record per layer, the module lacks what a scope needs, or the scope is `lagged`
            and an optimizer LBFGS.
        RuntimeError: outside of training, or if the micro-batch before was never added, or `exact` can't look ahead.
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
        counts_ahead=lambda: requested_ahead(module, len(layers)),
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
    """Per layer, the token copies requested of each expert over the tokens of its balance scope.

    Args:
        layers: the MoE layers.
        records: one per layer, of this micro-batch.
        window: the micro-batches before it.
        all_reduce_sum: sum over all ranks; called at most once, for all layers together.
        counts_ahead: per layer, the counts of the step's later micro-batches on this rank; called at most once per
            step, on all ranks or on none.
    """
    counts = [record.requested_E for record in records]
    scopes = [layer.config.router.lb_loss_scope for layer in layers]
    state = window.scopes
    # What this rank contributes to a sum over ranks, by number of the layer.
    local: dict[int, Tensor] = {}
    ahead: list[Tensor] | None = None
    for i, scope in enumerate(scopes):
        # In the first step of a run `lagged` has no step before it and takes the micro-batch.
        if scope == "global_micro_batch" or (scope == "lagged" and state.previous is None):
            local[i] = counts[i]
        elif scope == "accumulated":
            local[i] = counts[i] + window.requested[i] if window.requested else counts[i]
        elif scope == "exact" and i not in state.foreseen:
            # The first micro-batch of a step looks ahead, once for all layers; the others use what it found.
            ahead = counts_ahead() if ahead is None else ahead
            local[i] = counts[i] + ahead[i]
        elif scope == "exact":
            counts[i] = state.foreseen[i]
        elif scope == "lagged":
            counts[i] = state.requested_before(i, like=counts[i])
    if local:
        # One message, whatever the number of layers and scopes.
        sizes = [part.numel() for part in local.values()]
        sums = all_reduce_sum(torch.cat(list(local.values()))).split(sizes)
        for i, total in zip(local, sums, strict=True):
            counts[i] = total
    state.foreseen = {i: counts[i] for i, scope in enumerate(scopes) if scope == "exact"}
    return counts


def _needed_window(module: L.LightningModule, layers: Sequence[MoE]) -> StepWindow:
    """The module's window; an empty one where none is there and no scope needs it."""
    window = window_of(module)
    scopes = {layer.config.router.lb_loss_scope for layer in layers}
    beyond = sorted(scopes & {"accumulated", "lagged", "exact"})
    if window is None and beyond:
        raise ValueError(
            f"model.moe.router.lb_loss_scope={beyond[0]!r} needs the counts of a whole optimizer step; let "
            f"{type(module).__name__} inherit lightning_moe.StepHooks and call `self.window.add(...)`, or "
            "`self.window.record(...)`, in training_step"
        )
    if "exact" in scopes and not isinstance(module, RoutesAhead):
        raise ValueError(
            f"model.moe.router.lb_loss_scope='exact' needs {type(module).__name__} to have a method "
            "routing_step(batch, batch_idx) that gives the routing records of a batch; write one, or choose "
            "accumulated or lagged"
        )
    # A module outside of a Trainer has no optimizer steps.
    if window is not None and module._trainer is not None and module.trainer.training:
        close_steps(module.trainer)
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
        if window.scopes.num_awaited:
            raise RuntimeError(
                f"model.moe.router.lb_loss_scope={beyond[0]!r} needs every micro-batch of a step, and the one before "
                "was not added: after step_router_losses, call `self.window.add(...)` or `self.window.record(...)` "
                "with the same records"
            )
        window.scopes.num_awaited = len(layers)
    return StepWindow() if window is None else window
