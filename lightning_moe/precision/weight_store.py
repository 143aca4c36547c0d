"""A weight quantized in the two directions that forward and backward read it in."""

import weakref
from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_moe.precision.formats import Quantized
from lightning_moe.precision.released import ReleasedParameter, refuse_values

Quantize = Callable[[Tensor], Quantized]


class _OptimizerSteps:
    """Counts the steps of all optimizers in this process."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


# torch 2.13's fused optimizers change a tensor and leave its version as it was.
_STEPS: Final = _OptimizerSteps()
register_optimizer_step_post_hook(_STEPS)


class WeightStore:
    """Keeps both layouts of one weight until that changes: once per optimizer step, whatever the accumulation.

    Every optimizer step counts as a change. Others are seen by the tensor's version, which in-place operations raise,
    and by its identity and memory. Writing through `weight.data` leaves no trace, as callbacks do that swap in averaged
    weights for evaluation: so a change of mode counts, too, and after any other such write `forget` must be called.
    Copies and pickles start empty, and nothing here is in a state dict.

    For a `ReleasedParameter` it has the codes that `hold` made last; there are no values to make others from.

    Bytes per weight with MXFP8: 2 * 33/32.

    Args:
        quantize: along the last dimension.
    """

    def __init__(self, quantize: Quantize) -> None:
        self._quantize = quantize
        self._layouts: tuple[Quantized, Quantized] | None = None
        self._holds = False
        self._weight: weakref.ref[Tensor] | None = None
        self._state: tuple[object, ...] = ()

    def layouts(
        self, weight_GXY: Float[Tensor, "G X Y"], *, training: bool = True
    ) -> tuple[Quantized, Quantized]:
        """The weight quantized along Y, shape (G, X, Y), and along X, shape (G, Y, X).

        Raises:
            RuntimeError: for a weight that was released and whose codes aren't here.
        """
        if isinstance(weight_GXY, ReleasedParameter):
            if self._layouts is None:
                refuse_values("a forward")
            return self._layouts
        if weight_GXY.is_inference():  # has no version
            return self._quantized(weight_GXY)
        memory = (weight_GXY.data_ptr(), weight_GXY.dtype, weight_GXY.device)
        state = (_STEPS.count, weight_GXY._version, training, *memory)
        known = self._weight is not None and self._weight() is weight_GXY
        if self._layouts is None or not known or self._state != state:
            self._layouts = self._quantized(weight_GXY)
            self._weight, self._state = weakref.ref(weight_GXY), state
        return self._layouts

    def _quantized(self, weight_GXY: Tensor) -> tuple[Quantized, Quantized]:
        # Lightning validates in inference mode; what is made there could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            weight_GXY = weight_GXY.detach()
            along_x = self._quantize(weight_GXY.transpose(1, 2).contiguous())
            return self._quantize(weight_GXY), along_x

    @property
    def nbytes(self) -> int:
        """Bytes of both layouts; 0 before the first use."""
        return 0 if self._layouts is None else sum(layout.nbytes for layout in self._layouts)

    def hold(self, weight_GXY: Float[Tensor, "G X Y"]) -> None:
        """Keep the codes of a weight that is dropped; `forget` keeps them, too, until `let_go`."""
        self._layouts = None  # frees the old codes before new ones are made
        self._layouts = self._quantized(weight_GXY)
        self._holds = True

    def let_go(self) -> None:
        """Drop these codes, and quantize the weight again at the next use."""
        self._holds = False
        self.forget()

    def forget(self) -> None:
        """Quantize anew at the next use."""
        if not self._holds:
            self._layouts = self._weight = None

    def __reduce__(self) -> tuple[type["WeightStore"], tuple[Quantize]]:
        return WeightStore, (self._quantize,)
