"""The precision of a Trainer whose experts or linear layers compute in eight bits."""

from contextlib import AbstractContextManager
from typing import Any, Literal, cast, get_args

from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.config import FP8_BACKENDS, FP8Config, LinearFormat, ScaleMode
from lightning_moe.config.checks import check_bools, check_choices, given
from lightning_moe.nn import Experts, routed_experts
from lightning_moe.precision import LinearRecipe
from lightning_moe.strategy.linears import LinearSwap

Base = Literal["32-true", "bf16-mixed", "bf16-true"]


class MoEPrecision(Precision):
    """Experts, linear layers or both in eight bits, the rest in `base`: `Trainer(plugins=[MoEPrecision("mxfp8")])`.

    It gives `model.moe.backend` to the layers of `lightning_moe.nn` in any LightningModule, and converts their linear
    layers, from setup to teardown. Router, expert bias, embeddings, head, master weights, moments and checkpoints
    are the same as without it, so a run can change its precision when it is resumed.

    Args:
        experts: `mxfp8` or `fp8_rowwise`; None leaves them to their config.
        base: the Trainer's precision for all the rest; leave `Trainer(precision=...)` unset.
        linears: what projections of attention, dense layers and shared experts compute in: `fp8_tensorwise`,
            `fp8_rowwise` or `mxfp8`, by torchao; None is `base`. See `LinearSwap` for which layers those are.
        scale_mode: see `model.moe.fp8.scale_mode`.
        emulate: see `model.moe.fp8.emulate`; for experts and linear layers.
        fp8_only: see `model.moe.fp8.fp8_only`; for experts.

    Raises:
        ValueError: if a value isn't one of these, or has no effect; in setup, if the module has no such layer, its
            config asks for another backend, experts can't run on this one here, or a linear layer can't be converted
            or can't run in this precision here.
        TypeError: if `emulate` or `fp8_only` isn't a bool.
    """

    def __init__(
        self,
        experts: str | None = None,
        base: str = "bf16-mixed",
        *,
        linears: str | None = None,
        scale_mode: str = "rceil",
        emulate: bool = False,
        fp8_only: bool = False,
    ) -> None:
        check_choices("MoEPrecision", FP8_BACKENDS, **given(experts=experts))
        check_choices("MoEPrecision", get_args(LinearFormat), **given(linears=linears))
        # FP8 scales need the range of these; float16 has not got it.
        check_choices("MoEPrecision", get_args(Base), base=base)
        check_choices("MoEPrecision", get_args(ScaleMode), scale_mode=scale_mode)
        check_bools("MoEPrecision", emulate=emulate, fp8_only=fp8_only)
        if experts is None and linears is None:
            raise ValueError(
                "MoEPrecision has no effect without experts or linears; set one, or use trainer.precision"
            )
        if scale_mode != "rceil" and "mxfp8" not in (experts, linears):
            raise ValueError(
                f"MoEPrecision scale_mode={scale_mode!r} has no effect with experts={experts} and linears={linears}; "
                "unset it or choose mxfp8"
            )
        if fp8_only and experts is None:
            raise ValueError(
                "MoEPrecision fp8_only=True has no effect without experts; unset it or set experts"
            )
        # All are checked above.
        self.experts = experts
        self.precision: Base = cast("Base", base)
        mode = cast("ScaleMode", scale_mode)
        self.fp8 = FP8Config(
            scale_mode=mode if experts == "mxfp8" else "rceil", emulate=emulate, fp8_only=fp8_only
        )
        self.linears: LinearSwap | None = None
        if linears is not None:
            name = cast("LinearFormat", linears)
            self.linears = LinearSwap(LinearRecipe(name=name, scale_mode=mode, emulate=emulate))
        self._base = _plugin(self.precision, "cpu")
        self._converted: list[Experts] = []

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the experts their backend and convert linear layers, then do what `base` does."""
        if self.experts is not None:
            self._converted = self._experts_to_convert(module)
        if self.linears is not None:
            self.linears.swap(module)
        for experts in self._converted:
            assert self.experts is not None
            experts.use_backend(self.experts, self.fp8, by_plugin=True)
        return self._base.convert_module(module)

    def _experts_to_convert(self, module: nn.Module) -> list[Experts]:
        found = routed_experts(module)
        if not found:
            raise ValueError(
                f"MoEPrecision experts={self.experts} has no effect: the module has no layer of lightning_moe.nn.MoE"
            )
        for experts in found:
            self._refuse_clash(experts)
        return found

    def _refuse_clash(self, experts: Experts) -> None:
        config = experts.config
        same = config.backend == self.experts and config.fp8 == self.fp8
        if config.backend != "auto" and not same:
            raise ValueError(
                f"model.moe.backend={config.backend} with model.moe.fp8={config.fp8} clashes with "
                f"MoEPrecision({self.experts!r}) with {self.fp8}; leave model.moe.backend=auto"
            )

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Autocast needs the type of the device, on which the module is by now; experts and linears must run there."""
        self._base = _plugin(self.precision, next(model.parameters()).device.type)
        with self.forward_context():
            for experts in self._converted:
                experts.backend.settle(experts.sizes())
            if self.linears is not None:
                rank_zero_info(self.linears.settle())
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.forward_context()

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        """As in `base`."""
        return self._base.module_init_context()

    @override
    def convert_input(self, data: Any) -> Any:
        """As in `base`."""
        return self._base.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        """As in `base`."""
        return self._base.convert_output(data)

    @override
    def teardown(self) -> None:
        """Experts run on what their config says again, and linear layers are what they were."""
        if self.linears is not None:
            self.linears.restore()
        for experts in self._converted:
            experts.use_backend(experts.config.backend, experts.config.fp8, by_plugin=False)
        self._converted = []


def _plugin(base: Base, device: str) -> Precision:
    if base == "bf16-mixed":
        return MixedPrecision(base, device)
    return HalfPrecision(base) if base == "bf16-true" else Precision()
