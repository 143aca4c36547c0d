"""One mixture-of-experts layer: router, routed experts, latent projections and shared expert."""

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    POSITIVE,
    check_bools,
    check_choices,
    check_floats,
    check_instances,
    check_ints,
    given,
)
from lightning_moe.config.fp8 import EXPERT_BACKEND_NAMES, ExpertBackendName, FP8Config
from lightning_moe.config.router import RouterConfig

Activation = Literal["swiglu", "relu2", "gpt_oss_swiglu"]
SharedActivation = Literal["swiglu", "relu2"]
LatentNorm = Literal["rms", "layer"]

DEFAULT_ACTIVATION_ALPHA: Final = 1.702


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentMoEConfig:
    """A narrower width that routed experts work in; router and shared expert keep model width.

    Attributes:
        latent_dim: width of the routed experts' input and output, below the model width.
        bias: add biases to the down and the up projection.
        norm: of the experts' output before the up projection: `rms` or `layer`; None has none.
        norm_eps: added to the norm's mean square or variance; None takes `model.norm_eps`.
        norm_bias: add a bias after the norm.
    """

    latent_dim: int
    bias: bool = False
    norm: LatentNorm | None = None
    norm_eps: float | None = None
    norm_bias: bool = False

    def __post_init__(self) -> None:
        """Check every option, then that those of the norm have one."""
        section = "model.moe.latent"
        check_ints(section, AT_LEAST_ONE, latent_dim=self.latent_dim)
        check_bools(section, bias=self.bias, norm_bias=self.norm_bias)
        if isinstance(self.norm, bool):
            now = "rms" if self.norm else "null (None in Python)"
            raise ValueError(f"{section}.norm={self.norm} is not a kind of norm; write {now}")
        check_choices(section, get_args(LatentNorm), **given(norm=self.norm))
        check_floats(section, POSITIVE, **given(norm_eps=self.norm_eps))
        for name, value, default in (
            ("norm_eps", self.norm_eps, None),
            ("norm_bias", self.norm_bias, False),
        ):
            if self.norm is None and value != default:
                raise ValueError(
                    f"{section}.{name}={value} has no effect without a norm; unset it or choose "
                    f"{section}.norm={' or '.join(get_args(LatentNorm))}"
                )

    def check_width(self, d_model: int, *, path: str = "model.moe.latent") -> None:
        """Check what depends on the model width.

        Args:
            d_model: width of the layer's input.
            path: full option name of this section, for the message.

        Raises:
            ValueError: if `latent_dim` is not below `d_model`.
        """
        if self.latent_dim >= d_model:
            raise ValueError(
                f"{path}.latent_dim={self.latent_dim} is not smaller than model.d_model={d_model}; "
                f"choose latent_dim in [1, {d_model - 1}], or unset latent"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertConfig:
    """An expert without bias that every token passes; several equal one wider expert.

    Attributes:
        hidden_size: width of its hidden layer.
        activation: `swiglu` or `relu2`.
    """

    hidden_size: int = 256
    activation: SharedActivation = "swiglu"

    def __post_init__(self) -> None:
        """Check every option."""
        check_ints("model.moe.shared", AT_LEAST_ONE, hidden_size=self.hidden_size)
        check_choices("model.moe.shared", get_args(SharedActivation), activation=self.activation)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """One mixture-of-experts layer.

    Attributes:
        num_experts: routed experts, over all ranks.
        hidden_size: width of each routed expert's hidden layer.
        router: how tokens choose experts.
        latent: a narrower width for the routed experts; None works in model width.
        shared: an expert that every token passes, added to the routed output.
        activation: of the routed experts.
        activation_alpha: slope of the gate's sigmoid; only for `gpt_oss_swiglu`.
        activation_limit: clamp of gate (above) and up (both sides); only for `gpt_oss_swiglu`.
        expert_bias: add biases to both matrices of every routed expert.
        backend: how the experts' matrices are multiplied; `auto` picks by device and type;
            `lightning_moe.nn.register_expert_backend` adds names.
        fp8: options of the backends `fp8_rowwise` and `mxfp8`.
    """

    num_experts: int = 1
    hidden_size: int = 256
    router: RouterConfig = field(default_factory=RouterConfig)
    latent: LatentMoEConfig | None = None
    shared: SharedExpertConfig | None = None
    activation: Activation = "swiglu"
    activation_alpha: float = DEFAULT_ACTIVATION_ALPHA
    activation_limit: float | None = None
    expert_bias: bool = False
    backend: ExpertBackendName | str = "auto"
    fp8: FP8Config = field(default_factory=FP8Config)

    def __post_init__(self) -> None:
        """Check every option, then the relations between experts, router and activation."""
        check_ints(
            "model.moe", AT_LEAST_ONE, num_experts=self.num_experts, hidden_size=self.hidden_size
        )
        check_instances("model.moe", RouterConfig, router=self.router)
        check_instances("model.moe", LatentMoEConfig, **given(latent=self.latent))
        check_instances("model.moe", SharedExpertConfig, **given(shared=self.shared))
        check_choices("model.moe", get_args(Activation), activation=self.activation)
        EXPERT_BACKEND_NAMES.check(self.backend)
        check_floats("model.moe", POSITIVE, activation_alpha=self.activation_alpha)
        check_floats("model.moe", POSITIVE, **given(activation_limit=self.activation_limit))
        check_bools("model.moe", expert_bias=self.expert_bias)
        check_instances("model.moe", FP8Config, fp8=self.fp8)
        self.fp8.check_backend(self.backend)
        self._check_activation_options()
        self.router.check_num_experts(self.num_experts)

    def check_width(self, d_model: int, *, path: str = "model.moe") -> None:
        """Check what depends on the model width.

        Args:
            d_model: width of the layer's input.
            path: full option name of this section, for the message.

        Raises:
            ValueError: if `latent.latent_dim` is not below `d_model`.
        """
        if self.latent is not None:
            self.latent.check_width(d_model, path=f"{path}.latent")

    def _check_activation_options(self) -> None:
        if self.activation == "gpt_oss_swiglu":
            return
        for name, value, default in (
            ("activation_alpha", self.activation_alpha, DEFAULT_ACTIVATION_ALPHA),
            ("activation_limit", self.activation_limit, None),
        ):
            if value != default:
                raise ValueError(
                    f"model.moe.{name}={value} has no effect with "
                    f"model.moe.activation={self.activation!r}; unset it or choose gpt_oss_swiglu"
                )
