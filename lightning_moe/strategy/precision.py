"""The precision of a Trainer whose experts compute in eight bits."""

from contextlib import AbstractContextManager
from typing import Any, Literal, cast, get_args

from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from lightning_moe.config import FP8_BACKENDS, Backend, FP8Config, ScaleMode
from lightning_moe.config.checks import check_choices
from lightning_moe.nn import Experts

Base = Literal["32-true", "bf16-mixed", "bf16-true"]


class MoEPrecision(Precision):
    """Experts in MXFP8 or row-wise FP8, everything else in `base`: `Trainer(plugins=[MoEPrecision("mxfp8")])`.

    It gives `model.moe.backend` to the layers of `lightning_moe.nn` in any LightningModule, from setup to teardown.
    Router, selection bias, master weights, moments and checkpoints are the same as without it, so a run can change
    its precision when it is resumed.

    Args:
        experts: `mxfp8` or `fp8_rowwise`.
        base: the Trainer's precision for all the rest; leave `Trainer(precision=...)` unset.
        scale_mode: see `model.moe.fp8.scale_mode`.
        emulate: see `model.moe.fp8.emulate`.
        fp8_only: see `model.moe.fp8.fp8_only`.

    Raises:
        ValueError: if a value isn't one of these; in setup, if the module has no such layer or its config asks for
            another backend.
    """

    def __init__(
        self,
        experts: str,
        base: str = "bf16-mixed",
        *,
        scale_mode: ScaleMode = "rceil",
        emulate: bool = False,
        fp8_only: bool = False,
    ) -> None:
        check_choices("MoEPrecision", FP8_BACKENDS, experts=experts)
        # FP8 scales need the range of these; float16 has not got it.
        check_choices("MoEPrecision", get_args(Base), base=base)
        # Both are checked above.
        self.experts = cast("Backend", experts)
        self.precision: Base = cast("Base", base)
        self.fp8 = FP8Config(scale_mode=scale_mode, emulate=emulate, fp8_only=fp8_only)
        self.fp8.check_backend(experts)
        self._base = _plugin(self.precision, "cpu")
        self._converted: list[Experts] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the experts their backend, then do what `base` does."""
        self._converted = [part for part in module.modules() if isinstance(part, Experts)]
        if not self._converted:
            raise ValueError(
                f"MoEPrecision experts={self.experts} has no effect: the module has no layer of lightning_moe.nn.MoE"
            )
        for experts in self._converted:
            self._refuse_clash(experts)
        for experts in self._converted:
            experts.use_backend(self.experts, self.fp8, by_plugin=True)
        return self._base.convert_module(module)

    def _refuse_clash(self, experts: Experts) -> None:
        config = experts.config
        same = config.backend == self.experts and config.fp8 == self.fp8
        if config.backend != "auto" and not same:
            raise ValueError(
                f"model.moe.backend={config.backend} with model.moe.fp8={config.fp8} clashes with "
                f"MoEPrecision({self.experts!r}) with {self.fp8}; leave model.moe.backend=auto"
            )

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Autocast needs the type of the device, on which the module is by now."""
        self._base = _plugin(self.precision, next(model.parameters()).device.type)
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.forward_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.module_init_context()

    def convert_input(self, data: Any) -> Any:  # noqa: ANN401 - Lightning's signature
        """As in `base`."""
        return self._base.convert_input(data)

    def convert_output(self, data: Any) -> Any:  # noqa: ANN401
        """As in `base`."""
        return self._base.convert_output(data)

    def teardown(self) -> None:
        """The experts run on what their config says again."""
        for experts in self._converted:
            experts.use_backend(experts.config.backend, experts.config.fp8, by_plugin=False)
        self._converted = []


def _plugin(base: Base, device: str) -> Precision:
    if base == "bf16-mixed":
        return MixedPrecision(base, device)
    return HalfPrecision(base) if base == "bf16-true" else Precision()
