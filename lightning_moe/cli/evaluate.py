"""`lightning-moe evaluate`: the model as its checkpoint describes it, on data as it was trained on or as asked."""

from collections.abc import Mapping

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_moe.callbacks.start_from import load_weights_into
from lightning_moe.cli.checkpoints import check_fits, read_checkpoint, saved_section
from lightning_moe.cli.process import quieten
from lightning_moe.cli.run_config import RunConfig, check_vocabulary, data_config
from lightning_moe.cli.runs import save_options
from lightning_moe.cli.summary import print_facts, print_scores
from lightning_moe.cli.trainer import build_trainer, prepare_process
from lightning_moe.config import TransformerConfig, from_mapping
from lightning_moe.config.data import DataConfig
from lightning_moe.data import TokenDataModule
from lightning_moe.module import MoEModule


def run(config: DictConfig, _options: RunConfig | None = None) -> float:
    """Print the validation loss of `ckpt_path` and return it (nats per token).

    Raises:
        FileNotFoundError: if the checkpoint or a data file does not exist.
        ValueError: if the checkpoint can't be used, or options don't fit it.
    """
    quieten()
    source = f"ckpt_path={config.ckpt_path}"
    checkpoint = read_checkpoint(config.ckpt_path, "ckpt_path")
    saved_model = saved_section(checkpoint, "config")
    if saved_model is None:
        raise ValueError(
            f"{source} doesn't say which model it holds; it was not saved by MoEModule"
        )
    model = from_mapping(TransformerConfig, saved_model)
    options = _data_options(config.data, saved_section(checkpoint, "data"), source)
    check_vocabulary(options, model)
    prepare_process(config)
    data = TokenDataModule(options)
    data.setup("validate")
    check_fits(model, checkpoint, source)
    trainer = build_trainer(config, [_Weights(config.ckpt_path)])
    save_options(config)
    scores = trainer.validate(MoEModule(model), data, verbose=False)
    cross_entropy = float(scores[0]["val/ce"])
    _report(data, cross_entropy, config.ckpt_path, trainer.limit_val_batches)
    return cross_entropy


class _Weights(L.Callback):
    """Loads weights once the strategy has shared out the module, so that each rank reads its own part."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All ranks call it."""
        load_weights_into(trainer, self.path, "ckpt_path")


def _data_options(
    section: DictConfig, saved: Mapping[str, object] | None, source: str
) -> DataConfig:
    """The options that were given; the others as in training."""
    values: dict[str, object] = dict(saved or {})
    for name in section:
        if not OmegaConf.is_missing(section, name):
            value = section[name]
            values[str(name)] = (
                OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            )
        elif saved is None:
            raise ValueError(
                f"{source} doesn't say what data it was trained on; choose data=default, or set data.{name!s}"
            )
    return data_config(values)


@rank_zero_only
def _report(
    data: TokenDataModule, cross_entropy: float, path: str, limit_batches: int | float
) -> None:
    print_scores(data, cross_entropy, limit_batches)
    print_facts({"checkpoint": path, "data": data.describe()})
