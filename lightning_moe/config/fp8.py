"""How experts compute in eight bits."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_moe.config.checks import check_bools, check_choices
from lightning_moe.config.names import OptionNames

ExpertBackendName = Literal["auto", "loop", "torch", "grouped_gemm", "fp8_rowwise", "mxfp8"]
LinearFormat = Literal["fp8_tensorwise", "fp8_rowwise", "mxfp8"]
ScaleMode = Literal["rceil", "floor"]

FP8_BACKENDS: Final[tuple[ExpertBackendName, ...]] = ("fp8_rowwise", "mxfp8")
"""The expert backends that read `model.moe.fp8`."""

EXPERT_BACKEND_NAMES: Final = OptionNames("model.moe.backend", get_args(ExpertBackendName))
"""What `lightning_moe.nn.register_expert_backend` adds to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Config:
    """Options of the backends `fp8_rowwise` and `mxfp8`; others take none of them.

    Attributes:
        scale_mode: how mxfp8 rounds a block's scale to a power of two: `rceil` up, so that nothing is clipped,
            `floor` down, which clips the largest values of a block by up to 12.5 %.
        emulate: compute with the same codes and scales in float32 where the hardware has no such matmul; slower
            than float32, for tests and studies of accuracy.
        fp8_only: while fit runs, keep of each expert weight its codes and the sharded optimizer's master, and not
            the weight itself; needs `ExpertParallelStrategy`.
    """

    scale_mode: ScaleMode = "rceil"
    emulate: bool = False
    fp8_only: bool = False

    def __post_init__(self) -> None:
        """Check every option."""
        check_choices("model.moe.fp8", get_args(ScaleMode), scale_mode=self.scale_mode)
        check_bools("model.moe.fp8", emulate=self.emulate, fp8_only=self.fp8_only)

    def check_backend(self, backend: str) -> None:
        """Check that every option has an effect.

        Raises:
            ValueError: if an option is set that `backend` doesn't read.
        """
        if self.scale_mode != "rceil" and backend != "mxfp8":
            raise ValueError(
                f"model.moe.fp8.scale_mode={self.scale_mode!r} has no effect with model.moe.backend={backend!r}; "
                f"unset it or choose mxfp8"
            )
        for name in ("emulate", "fp8_only"):
            if getattr(self, name) and backend not in FP8_BACKENDS:
                raise ValueError(
                    f"model.moe.fp8.{name}=True has no effect with model.moe.backend={backend!r}; "
                    f"unset it or choose {' or '.join(FP8_BACKENDS)}"
                )
