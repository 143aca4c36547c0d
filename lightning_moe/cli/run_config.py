"""From Hydra's options to checked configs, before torch is imported; options without effect are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omegaconf import DictConfig, OmegaConf

from lightning_moe.config import MoEConfig, OptimConfig, TransformerConfig, from_mapping
from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    POSITIVE,
    check_floats,
    check_ints,
)
from lightning_moe.config.data import DataConfig

# What torch and numpy take.
_SEEDS: Final = 2**32
_COUNTS: Final = (
    "accumulate_grad_batches",
    "num_nodes",
    "check_val_every_n_epoch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The checked sections of a training run."""

    model: TransformerConfig
    optim: OptimConfig
    data: DataConfig

    @property
    def has_experts(self) -> bool:
        """Whether any layer routes."""
        return any(isinstance(layer.feed_forward, MoEConfig) for layer in self.model.layers)


def check_options(command: str, config: DictConfig, overrides: Sequence[str]) -> RunConfig | None:
    """Check all options of a command that can be checked without torch; the sections of `train`.

    Args:
        command: `train` or `evaluate`.
        config: all its options.
        overrides: what was given on the command line.

    Raises:
        FileNotFoundError: if a checkpoint does not exist.
        TypeError: if a value is of the wrong type.
        ValueError: if an option is unknown, clashes with another one, or has no effect.
    """
    _check_trainer(config)
    _check_checkpoints(config)
    if command == "train":
        return read_options(config, overrides)
    if config.trainer.get("limit_val_batches") == 0:
        raise ValueError(
            "trainer.limit_val_batches=0 leaves nothing to evaluate; leave it out, or set a number of batches"
        )
    return None


def _check_trainer(config: DictConfig) -> None:
    """What the Trainer takes without a word, or refuses with a traceback only once it trains."""
    trainer = config.get("trainer")
    if not isinstance(trainer, DictConfig):
        raise ValueError(f"trainer={trainer} must be a group of options; choose trainer=cpu")
    for name in ("callbacks", "logger", "strategy"):
        if trainer.get(name) is not None:
            raise ValueError(
                f"trainer.{name}={trainer[name]} has no effect; use the group `{name}`, such as {name}=null"
            )
    seed = config.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < _SEEDS):
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to {_SEEDS - 1}")
    numbers = {name: trainer[name] for name in _COUNTS if trainer.get(name) is not None}
    check_ints("trainer", AT_LEAST_ONE, **numbers)
    for name, check, interval in (
        ("log_every_n_steps", check_ints, NON_NEGATIVE),
        ("gradient_clip_val", check_floats, NON_NEGATIVE),
        ("val_check_interval", check_floats, POSITIVE),
    ):
        # An interval may be a time.
        if isinstance(trainer.get(name), int | float):
            check("trainer", interval, **{name: trainer[name]})
    _refuse_two_precisions(trainer)


def _refuse_two_precisions(section: DictConfig) -> None:
    """Lightning refuses them too, but names the plugin by its address."""
    plugins = section.get("plugins") or []
    for plugin in [plugins] if isinstance(plugins, DictConfig) else plugins:
        is_ours = isinstance(plugin, DictConfig) and str(plugin.get("_target_")).endswith(
            ".MoEPrecision"
        )
        if is_ours and section.get("precision") is not None:
            raise ValueError(
                f"trainer.precision={section.precision} clashes with MoEPrecision in trainer.plugins, whose base is "
                "the precision of everything else; set trainer.precision=null"
            )


def _check_checkpoints(config: DictConfig) -> None:
    for name in ("ckpt_path", "init_from"):
        path = config.get(name)
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"{name}={path} does not exist; give the path of a checkpoint")


def read_options(config: DictConfig, overrides: Sequence[str]) -> RunConfig:
    """Build the sections and refuse what would silently do nothing.

    Args:
        config: all options of `train`.
        overrides: what was given on the command line.

    Raises:
        ValueError: if an option is unknown, clashes with another one, or has no effect.
        TypeError: if a value is of the wrong type.
    """
    run = RunConfig(
        model=from_mapping(TransformerConfig, plain(config, "model"), "model"),
        optim=from_mapping(OptimConfig, plain(config, "optim"), "optim"),
        data=data_config(plain(config, "data")),
    )
    check_vocabulary(run.data, run.model)
    _check_experts(config, run)
    _check_dense(run, overrides)
    _check_length(config, run.optim)
    if config.ckpt_path is not None and config.init_from is not None:
        raise ValueError(
            f"ckpt_path={config.ckpt_path} goes on with an old run and init_from={config.init_from} starts a new one; "
            "give one of the two"
        )
    return run


def plain(config: DictConfig, section: str) -> dict[str, object]:
    """A section as plain values, interpolations resolved.

    Raises:
        TypeError: if it is no mapping.
    """
    found = config.get(section)
    values = None if found is None else OmegaConf.to_container(found, resolve=True)
    if not isinstance(values, dict):
        raise TypeError(
            f"{section}={values!r} must be a mapping of options; choose one of the group {section}"
        )
    return {str(name): value for name, value in values.items()}


def data_config(values: dict[str, object]) -> DataConfig:
    """The section `data`, where one path may stand for a list of one."""
    lists = {
        name: [values[name]] for name in ("paths", "val_paths") if isinstance(values.get(name), str)
    }
    return from_mapping(DataConfig, {**values, **lists}, "data")


def check_vocabulary(data: DataConfig, model: TransformerConfig) -> None:
    """Tokens are checked against the data's vocabulary, so it must be the model's.

    Raises:
        ValueError: if it is not.
    """
    if data.vocab_size != model.vocab_size:
        raise ValueError(
            f"data.vocab_size={data.vocab_size} differs from model.vocab_size={model.vocab_size}; "
            "set model.vocab_size only, data.vocab_size follows it"
        )


def _check_experts(config: DictConfig, run: RunConfig) -> None:
    # A layer of `layer_overrides` has its experts' options from model.moe as well.
    if run.model.moe is not None and not run.has_experts:
        raise ValueError(
            f"model.moe has no effect: no layer uses it (model.num_dense_layers={run.model.num_dense_layers} of "
            f"model.num_layers={run.model.num_layers} are dense, {len(run.model.layer_overrides)} are overridden); "
            "lower model.num_dense_layers, or set model.moe=null"
        )
    if run.has_experts:
        return
    for name, scale in (
        ("router", run.optim.router_lr_scale),
        ("expert", run.optim.expert_lr_scale),
    ):
        if scale != 1:
            raise ValueError(
                f"optim.{name}_lr_scale={scale} has no effect: no layer of the model has experts; unset it"
            )
    for name, callback in (config.get("callbacks") or {}).items():
        if callback is not None and str(callback.get("_target_", "")).endswith(
            ".ExpertLoadMonitor"
        ):
            raise ValueError(
                f"callbacks.{name} watches experts, but no layer of the model has any; choose callbacks=dense"
            )


def _check_dense(run: RunConfig, overrides: Sequence[str]) -> None:
    """A preset may bring a width along for those who add dense layers; a width that was asked for must be used."""
    given = any(
        override.lstrip("+").partition("=")[0] == "model.dense_hidden_size"
        for override in overrides
    )
    width = run.model.dense_hidden_size
    dense = [
        layer.feed_forward
        for layer in run.model.layers
        if not isinstance(layer.feed_forward, MoEConfig)
    ]
    if given and width is not None and all(layer.hidden_size != width for layer in dense):
        raise ValueError(
            f"model.dense_hidden_size={width} has no effect: no layer is dense with "
            f"model.num_dense_layers={run.model.num_dense_layers}; raise model.num_dense_layers, or unset it"
        )


def _check_length(config: DictConfig, optim: OptimConfig) -> None:
    trainer = config.trainer
    max_steps, max_epochs = trainer.get("max_steps", -1), trainer.get("max_epochs")
    if max_steps == -1 and max_epochs == -1 and trainer.get("max_time") is None:
        raise ValueError(
            "trainer.max_steps=-1 and trainer.max_epochs=-1 never end; set trainer.max_steps"
        )
    if (
        optim.schedule == "constant"
        or optim.unit != "steps"
        or optim.total is not None
        or max_steps <= 0
    ):
        return
    if optim.warmup + optim.decay > max_steps:
        raise ValueError(
            f"optim.warmup={optim.warmup} and optim.decay={optim.decay} don't fit into "
            f"trainer.max_steps={max_steps}; shorten them or train longer"
        )
