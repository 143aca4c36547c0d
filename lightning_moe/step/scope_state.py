"""The expert counts that balance scopes keep from one micro-batch, or optimizer step, to the next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moe.ops.records import Routing


class ScopeState:
    """What the balance scopes of a module's layers need beside the micro-batch at hand.

    Attributes:
        previous: for `lagged`: per MoE layer, the token copies requested of each expert in the last closed step, over
            all ranks. None before the first step of a fit that doesn't resume another.
        foreseen: for `exact`: the same for the open step, by number of the layer.
        num_awaited: routing records that `step_router_losses` was called with and that were not added since.
    """

    def __init__(self) -> None:
        self.previous: tuple[Tensor, ...] | None = None
        self.foreseen: dict[int, Tensor] = {}
        self.num_awaited = 0

    def begin_step(self) -> None:
        """Forget what holds for one step only."""
        self.foreseen = {}
        self.num_awaited = 0

    def receive(self, records: Sequence[Routing]) -> None:
        """Note that these records were added.

        Raises:
            ValueError: if `step_router_losses` was called with more or fewer.
        """
        if self.num_awaited and len(records) != self.num_awaited:
            raise ValueError(
                f"step_router_losses was called with {self.num_awaited} routing records, and {len(records)} were added "
                "to the window; its balance scopes need them all: `self.window.add(loss_sum, num_tokens, records)`, or "
                "`self.window.record(records)`"
            )
        self.num_awaited = 0

    def requested_before(self, layer: int, *, like: Tensor) -> Tensor:
        """Token copies requested of each expert in the step before, on the device of `like`.

        Raises:
            ValueError: if that step had other layers.
        """
        previous = self.previous or ()
        if layer >= len(previous) or previous[layer].shape != like.shape:
            raise ValueError(
                f"the optimizer step before had counts of shapes {[tuple(counts.shape) for counts in previous]}, and "
                f"MoE layer {layer} has {tuple(like.shape)}; add the records of all MoE layers to the window, and "
                "resume from a checkpoint of the same model"
            )
        return previous[layer].to(like.device)

    def end_step(self, requested: tuple[Tensor, ...]) -> None:
        """Keep the counts of the step that closes, and compare them with the foreseen ones.

        Noise that differs between the forward ahead and training would make the foreseen counts wrong. A near tie may
        fall otherwise in a forward without gradients, whose kernels can differ: 1 % is allowed.

        Raises:
            RuntimeError: for the first layer where they differ by more.
        """
        if self.foreseen:
            pairs = [(requested[layer], counts) for layer, counts in self.foreseen.items()]
            # One wait for the device, however many layers.
            differs = torch.stack([(a - b).abs().sum() * 100 > a.sum() for a, b in pairs]).tolist()
            for layer, (counted, counts), refused in zip(
                self.foreseen, pairs, differs, strict=True
            ):
                if refused:
                    raise RuntimeError(
                        f"model.moe.router.lb_loss_scope='exact': MoE layer {layer} was to route {counts.tolist()} "
                        f"copies to its experts in this optimizer step and routed {counted.tolist()}; routing_step "
                        "must repeat what training_step does with the same batch, random numbers included, and "
                        "training_step must call step_router_losses and add to its window once per batch"
                    )
        self.begin_step()
        self.previous = requested
