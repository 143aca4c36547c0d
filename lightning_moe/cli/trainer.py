"""What train and evaluate share: the Trainer of the options, and the resolved options beside its results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_moe.cli.memory import keep_freed_memory
from lightning_moe.cli.stopping import StopAtSigterm


def run_folder() -> Path:
    """The folder of this job (`hydra.run.dir`)."""
    return Path(HydraConfig.get().runtime.output_dir)


def prepare_process(config: DictConfig) -> None:
    """What comes before the first tensor: options on disk, allocator, seeds.

    Raises:
        ValueError: if two options choose the precision.
    """
    _refuse_two_precisions(config.trainer)
    _save_options(config)
    if config.keep_freed_memory and config.trainer.accelerator == "cpu":
        keep_freed_memory()
    if config.seed is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)


def build_trainer(config: DictConfig, callbacks: Sequence[L.Callback] = ()) -> L.Trainer:
    """The Trainer of `trainer`, `strategy`, `callbacks` and `logger`, with further `callbacks`."""
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy)
        if isinstance(config.strategy, DictConfig)
        else config.strategy,
        callbacks=[*_instances(config.callbacks), *callbacks, StopAtSigterm()],
        # False: none at all. Lightning would make one of its own from an empty list.
        logger=_instances(config.logger) or False,
        _convert_="all",
    )
    return trainer


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


def _instances(section: DictConfig | None) -> list[Any]:
    return [
        instantiate(entry, _convert_="all")
        for entry in (section or {}).values()
        if entry is not None
    ]


@rank_zero_only
def _save_options(config: DictConfig) -> None:
    OmegaConf.save(config, run_folder() / "config.yaml", resolve=True)
