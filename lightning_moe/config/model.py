"""The whole transformer as a value: sizes, layers, norms, embeddings, counts and presets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from lightning_moe.config import counting
from lightning_moe.config.build import from_mapping
from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    check_bools,
    check_choices,
    check_floats,
    check_instances,
    check_ints,
    given,
)
from lightning_moe.config.counting import NormPlacement
from lightning_moe.config.inheritance import complete_overrides
from lightning_moe.config.layers import (
    AttentionConfig,
    Compile,
    DenseConfig,
    LayerConfig,
    LayerSpec,
    Recompute,
)
from lightning_moe.config.moe import MoEConfig
from lightning_moe.config.presets import find_preset


class LayerOverrides(Mapping[int, LayerConfig]):
    """An immutable mapping from layer index to `LayerConfig`; can be hashed and pickled."""

    __slots__ = ("_layers",)

    def __init__(self, layers: Mapping[int, LayerConfig]) -> None:
        self._layers = dict(layers)

    def __getitem__(self, layer: int) -> LayerConfig:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __hash__(self) -> int:
        return hash(frozenset(self._layers.items()))

    def __repr__(self) -> str:
        return repr(self._layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """A decoder-only transformer whose layers are dense or mixture-of-experts.

    Attributes:
        vocab_size: rows of the embedding and of the head.
        d_model: width of the residual stream.
        num_layers: number of blocks.
        attention: of every layer that `layer_overrides` does not change.
        moe: of every MoE layer that `layer_overrides` does not change; None makes all layers dense.
        dense_hidden_size: hidden width of the dense SwiGLU layers; needed if there is any.
        num_dense_layers: how many first layers are dense, in [0, num_layers].
        layer_overrides: what single layers do differently, by layer index from 0.
        window_pattern: sliding windows (tokens; None is full attention) cycled over the layers.
        norm_placement: RMS norm before (`pre`) or after (`post`) attention and feed-forward, or on
            both sides (`peri`).
        norm_eps: added to the mean square inside every RMS norm, greater than 0.
        scale_embedding: multiply the embedding by sqrt(d_model).
        norm_embedding: RMS norm of the (scaled) embedding.
        tie_embeddings: the head uses the embedding's weight.
        lm_z_loss_weight: weight of the head's squared log-partition (nats squared) per token.
        init_std: standard deviation of initial weights, greater than 0.
        recompute: what is computed again in the backward pass instead of keeping its
            activations: each whole `block`, or of each block only the `moe` (its norms included;
            dense layers keep theirs) or only the `attention` half. `layer_overrides` chooses
            another for single layers.
        offload_activations: keep in host memory what blocks save for the backward pass, with
            `recompute` only what is still saved. On a CPU nothing is copied.
        compile: the two halves of each block through torch.compile: `inductor` makes fused
            kernels, `aot_eager` only traces, to find out what fails. One whole graph for each
            half, but with experts on several ranks and the dispatcher `all_to_all` the MoE half
            is split where rows travel.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoEConfig | None = None
    dense_hidden_size: int | None = None
    num_dense_layers: int = 0
    layer_overrides: Mapping[int, LayerConfig] = field(default_factory=lambda: LayerOverrides({}))
    window_pattern: tuple[int | None, ...] | None = None
    norm_placement: NormPlacement = "pre"
    norm_eps: float = 1e-6
    scale_embedding: bool = False
    norm_embedding: bool = False
    tie_embeddings: bool = False
    lm_z_loss_weight: float | None = None
    init_std: float = 0.02
    recompute: Recompute = "none"
    offload_activations: bool = False
    compile: Compile = "none"

    def __post_init__(self) -> None:
        """Check every option, then what each resolved layer asks of the model width."""
        self._check_values()
        self._check_overrides()
        # The caller's dict could change later; a copy keeps the value frozen.
        object.__setattr__(self, "layer_overrides", LayerOverrides(self.layer_overrides))
        self._check_window_pattern()
        self._check_layers()

    @classmethod
    def preset(cls, name: str, /, **overrides: object) -> "TransformerConfig":
        """The named model; each keyword in `overrides` replaces one whole field.

        Raises:
            ValueError: if there is no such preset or field.
        """
        return from_mapping(cls, {**find_preset(name), **overrides})

    @classmethod
    def complete(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        """Plain options for `from_mapping`, in which single layers inherit what they don't override."""
        return complete_overrides(options)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is, from first to last."""
        return tuple(self._layer(index) for index in range(self.num_layers))

    @property
    def num_params(self) -> int:
        """Parameters of the model, embeddings and norms included, buffers not."""
        return self._count_params(active_only=False)

    @property
    def num_active_params(self) -> int:
        """Parameters one token uses: all of them, but only `top_k` routed experts per layer."""
        return self._count_params(active_only=True)

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs per token, forward and backward, of sequences of `seq_len` tokens.

        Counts active matrices and allowed query-key pairs; recomputation is not included.

        Raises:
            ValueError: if `seq_len` is not positive.
        """
        check_ints("flops_per_token", AT_LEAST_ONE, seq_len=seq_len)
        return counting.flops_per_token(
            self.layers, d_model=self.d_model, vocab_size=self.vocab_size, seq_len=seq_len
        )

    def _layer(self, index: int) -> LayerSpec:
        override = self.layer_overrides.get(index, LayerConfig())
        attention = override.attention
        if attention is None:
            attention = self.attention
            if self.window_pattern is not None:
                window = self.window_pattern[index % len(self.window_pattern)]
                attention = replace(attention, sliding_window=window)
        feed_forward = self._feed_forward(index, override)
        recompute = override.recompute
        if recompute is None:
            # A model may mix dense and MoE layers, so that `moe` means those that have one.
            dense = isinstance(feed_forward, DenseConfig)
            recompute = "none" if dense and self.recompute == "moe" else self.recompute
        return LayerSpec(attention=attention, feed_forward=feed_forward, recompute=recompute)

    def _feed_forward(self, index: int, override: LayerConfig) -> MoEConfig | DenseConfig:
        if override.moe is not None:
            return override.moe
        if override.dense_hidden_size is not None:
            return DenseConfig(hidden_size=override.dense_hidden_size)
        if self.moe is not None and index >= self.num_dense_layers:
            return self.moe
        if self.dense_hidden_size is None:
            dense = f"model.num_dense_layers={self.num_dense_layers}"
            raise ValueError(
                f"model.dense_hidden_size=None, but layer {index} is dense "
                f"({'model.moe=None' if self.moe is None else dense}); "
                f"set model.dense_hidden_size, or make the layer MoE"
            )
        return DenseConfig(hidden_size=self.dense_hidden_size)

    def _count_params(self, *, active_only: bool) -> int:
        embedding = self.vocab_size * self.d_model
        outside = embedding if self.tie_embeddings else 2 * embedding
        outside += self.d_model * (2 if self.norm_embedding else 1)
        return outside + sum(
            counting.layer_params(
                layer, self.d_model, placement=self.norm_placement, active_only=active_only
            )
            for layer in self.layers
        )

    def _check_values(self) -> None:
        check_ints(
            "model",
            AT_LEAST_ONE,
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
        )
        check_ints("model", NON_NEGATIVE, num_dense_layers=self.num_dense_layers)
        check_ints("model", AT_LEAST_ONE, **given(dense_hidden_size=self.dense_hidden_size))
        check_instances("model", AttentionConfig, attention=self.attention)
        check_instances("model", MoEConfig, **given(moe=self.moe))
        check_choices("model", get_args(NormPlacement), norm_placement=self.norm_placement)
        check_choices("model", get_args(Recompute), recompute=self.recompute)
        check_choices("model", get_args(Compile), compile=self.compile)
        check_floats("model", POSITIVE, norm_eps=self.norm_eps, init_std=self.init_std)
        check_floats("model", NON_NEGATIVE, **given(lm_z_loss_weight=self.lm_z_loss_weight))
        check_bools(
            "model",
            scale_embedding=self.scale_embedding,
            norm_embedding=self.norm_embedding,
            tie_embeddings=self.tie_embeddings,
            offload_activations=self.offload_activations,
        )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} is more than "
                f"model.num_layers={self.num_layers}; "
                f"choose num_dense_layers in [0, {self.num_layers}]"
            )

    def _check_overrides(self) -> None:
        check_instances("model", Mapping, layer_overrides=self.layer_overrides)
        for layer, override in self.layer_overrides.items():
            check_ints("model.layer_overrides", NON_NEGATIVE, layer=layer)
            check_instances("model", LayerConfig, **{f"layer_overrides[{layer}]": override})
            if layer >= self.num_layers:
                raise ValueError(
                    f"model.layer_overrides[{layer}] names a layer that does not exist with "
                    f"model.num_layers={self.num_layers}; choose from 0 to {self.num_layers - 1}"
                )

    def _check_window_pattern(self) -> None:
        if self.window_pattern is None:
            return
        check_instances("model", tuple, window_pattern=self.window_pattern)
        if not self.window_pattern:
            raise ValueError("model.window_pattern=() is empty; unset it or name a window")
        for position, window in enumerate(self.window_pattern):
            check_ints("model", AT_LEAST_ONE, **given(**{f"window_pattern[{position}]": window}))
        if self.attention.sliding_window is not None:
            raise ValueError(
                f"model.attention.sliding_window={self.attention.sliding_window} and "
                f"model.window_pattern={self.window_pattern} both set the windows; unset one"
            )

    def _check_layers(self) -> None:
        if self.recompute == "moe" and not any(
            isinstance(layer.feed_forward, MoEConfig) for layer in self.layers
        ):
            raise ValueError(
                "model.recompute=moe, but no layer has a mixture of experts; choose block or attention"
            )
        for index, layer in enumerate(self.layers):
            override = self.layer_overrides.get(index, LayerConfig())
            own = f"model.layer_overrides[{index}]"
            section = "model" if override.attention is None else own
            layer.attention.check_width(self.d_model, path=f"{section}.attention")
            if isinstance(layer.feed_forward, MoEConfig):
                section = "model" if override.moe is None else own
                layer.feed_forward.check_width(self.d_model, path=f"{section}.moe")
            elif override.recompute == "moe":
                raise ValueError(
                    f"{own}.recompute=moe, but layer {index} is dense; choose block or attention"
                )
