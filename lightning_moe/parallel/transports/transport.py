"""What a transport is: options that build the dispatchers of layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_moe.config import MoEConfig
from lightning_moe.nn.dispatch import Dispatcher
from lightning_moe.ops.read_back import numbers_on
from lightning_moe.parallel.collectives import AxisGroup


class LargerBatches:
    """Micro-batches for which fixed shapes have too few slots: noted by dispatchers, refused on all ranks at once.

    A rank that raised alone would leave the others waiting for its rows. Its dispatcher goes on instead, with the same
    shapes and more drops than usual, and the error comes before the optimizer reads a gradient.
    """

    def __init__(self) -> None:
        self._largest = (0, 0)

    def note(self, num_tokens: int, max_tokens: int) -> None:
        """A micro-batch of this rank, and how many tokens there may be."""
        self._largest = max(self._largest, (num_tokens, max_tokens))

    def refuse(self, world: AxisGroup, device: torch.device) -> None:
        """One message per optimizer step, none per batch; called by all ranks.

        Raises:
            RuntimeError: on all ranks, if any of them has noted a batch.
        """
        num_tokens, max_tokens = self._largest
        self._largest = (0, 0)
        if world.size > 1:
            largest = numbers_on(device, (num_tokens, max_tokens), torch.int64)
            world.all_reduce(largest, "max")
            num_tokens, max_tokens = largest.tolist()
        if num_tokens:
            raise larger_batch(num_tokens, max_tokens)


def larger_batch(num_tokens: int, max_tokens: int) -> RuntimeError:
    """The error for a micro-batch of more tokens than there is room for."""
    return RuntimeError(
        f"a micro-batch of {num_tokens} tokens is larger than the {max_tokens} that strategy.dispatcher=static has "
        "slots for; set strategy.warmup_tokens to the tokens of the largest micro-batch of any rank, or use all_to_all"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport(ABC):
    """How token copies travel to the ranks of their experts: options, checked on construction, equal on all ranks.

    A further transport is a file with a frozen dataclass that derives from this class and the `Dispatcher` that it
    builds, and one line in `parallel.transports.TRANSPORTS`; outside of this package, `register_transport`.

    Attributes:
        fixed_shapes: whether dispatchers note batches that are too large, for the strategy to refuse at each step.
    """

    fixed_shapes: ClassVar[bool] = False

    def check_ranks(self, ep: int, *, requested: int | str) -> None:  # noqa: B027 - most have nothing to check
        """Check what depends on the number of ranks that share out the experts, before they connect.

        Args:
            ep: the number.
            requested: `strategy.expert_parallel`, from which it follows.
        """

    def for_micro_batches(self, num_tokens: int) -> "Transport":
        """The options for micro-batches of at most `num_tokens` tokens per rank, where the training data tells."""
        return self

    @abstractmethod
    def build(
        self, group: AxisGroup, layer: MoEConfig, larger: LargerBatches | None = None
    ) -> Dispatcher:
        """A dispatcher for one layer.

        Args:
            group: the ranks that share out its experts.
            layer: its options.
            larger: for transports with `fixed_shapes`: takes note of batches that are too large.
        """
