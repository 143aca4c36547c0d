"""The type of the context that autograd hands to a custom function; torch's own leaves half of it untyped."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:

    class Context(Protocol):
        """What `torch.autograd.Function` methods use of their first argument."""

        needs_input_grad: tuple[bool, ...]

        @property
        def saved_tensors(self) -> tuple[Tensor, ...]:
            """What `save_for_backward` kept; an optional tensor comes back as None."""
            ...

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Keep tensors for backward."""
            ...

        def mark_non_differentiable(self, *outputs: Tensor) -> None:
            """These outputs never carry gradient."""
            ...

else:
    # A checker at run time would have to read `saved_tensors`, which a checkpoint allows once.
    Context = FunctionCtx
