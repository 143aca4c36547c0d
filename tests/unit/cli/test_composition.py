"""Every option composes, and equals the dataclass it comes from."""

from pathlib import Path
from typing import get_args

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_moe import StaticDispatch
from lightning_moe.cli.groups import find_conf, list_groups, register_groups
from lightning_moe.cli.run_config import read_options
from lightning_moe.config import PRESETS, BalanceScope, OptimConfig, TransformerConfig
from lightning_moe.config.data import DataConfig
from lightning_moe.config.router import BALANCE_INVARIANCE
from tests.unit.cli.conftest import Compose

CONF = find_conf()
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_is_accepted(compose_train: Compose, experiment: str) -> None:
    config = compose_train(f"experiment={experiment}")
    assert config.name == experiment
    read_options(config, [])


def test_two_ranks_are_an_experiment_of_equal_batches_and_a_balance_that_ranks_do_not_change(
    compose_train: Compose,
) -> None:
    one, two = (
        read_options(compose_train(f"experiment={name}"), [])
        for name in ("tiny_cpu", "tiny_ep2_cpu")
    )
    assert 2 * two.data.batch_size == one.data.batch_size
    assert two.model.moe is not None
    assert "ranks" in BALANCE_INVARIANCE[two.model.moe.router.lb_loss_scope]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_model_and_equals_itself(compose_train: Compose, preset: str) -> None:
    options = read_options(compose_train(f"model={preset}"), [])
    assert options.model == TransformerConfig.preset(preset)
    assert options.data.vocab_size == options.model.vocab_size


def test_optim_and_data_have_the_defaults_of_their_dataclasses(compose_train: Compose) -> None:
    options = read_options(compose_train(), [])
    assert options.optim == OptimConfig()
    assert options.data == DataConfig()


@pytest.mark.parametrize("group", ["trainer", "strategy", "callbacks", "logger"])
def test_every_option_of_the_other_groups_composes(compose_train: Compose, group: str) -> None:
    names = [path.stem for path in (CONF / group).glob("*.yaml")]
    assert len(names) > 1
    for name in names:
        assert compose_train(f"{group}={name}")[group] is not None


@pytest.mark.parametrize(
    "overrides",
    [
        ["dispatcher=static", "capacity_factor=2.0", "overflow=weight", "warmup_tokens=9"],
        [
            "dispatcher={_target_: lightning_moe.StaticDispatch, capacity_factor: 2.0, overflow: weight, "
            "warmup_tokens: 9}"
        ],
    ],
)
def test_a_transport_takes_its_options_by_name_or_as_a_dataclass(
    compose_train: Compose, overrides: list[str]
) -> None:
    overrides = [f"strategy.{override}" for override in (*overrides, "timeout=50.0")]
    strategy = instantiate(compose_train("strategy=expert_parallel", *overrides).strategy)
    assert strategy.transport == StaticDispatch(
        capacity_factor=2.0, overflow="weight", warmup_tokens=9
    )


def test_the_strategy_group_sets_a_word(compose_train: Compose) -> None:
    assert compose_train("strategy=ddp").strategy == "ddp"


def test_the_gpu_trainer_differs_from_the_cpu_one_in_device_and_precision(
    compose_train: Compose,
) -> None:
    cpu, gpu = (
        OmegaConf.to_container(compose_train(f"trainer={name}").trainer) for name in ("cpu", "gpu")
    )
    assert {name: value for name, value in gpu.items() if cpu[name] != value} == {
        "accelerator": "gpu",
        "precision": "bf16-mixed",
    }


def test_router_options_can_be_set_in_struct_mode(compose_train: Compose) -> None:
    options = read_options(
        compose_train(
            "model.moe.router.bias_gamma=null", "model.moe.router.top_k=3", "model.moe.backend=loop"
        ),
        [],
    )
    assert options.model.moe is not None
    assert options.model.moe.router.bias_gamma is None
    assert options.model.moe.router.top_k == 3
    assert options.model.moe.backend == "loop"


@pytest.mark.parametrize("scope", get_args(BalanceScope))
def test_every_balance_scope_can_be_chosen(compose_train: Compose, scope: str) -> None:
    overrides = [
        f"model.moe.router.lb_loss_scope={scope}",
        "model.moe.router.lb_loss_weight=0.01",
        "model.moe.router.lb_loss_over_layers=mean",
        "model.moe.router.bias_gamma=0.001",
        "model.moe.router.bias_centering=true",
    ]
    model = read_options(compose_train(*overrides), []).model
    assert model.moe is not None
    assert model.moe.router.lb_loss_scope == scope
    assert model.moe.router.lb_loss_over_layers == "mean"
    assert model.moe.router.bias_centering


def test_an_optional_section_can_be_set(compose_train: Compose) -> None:
    options = read_options(compose_train("model.moe.latent={latent_dim:64}"), [])
    assert options.model.moe is not None
    assert options.model.moe.latent is not None
    assert options.model.moe.latent.latent_dim == 64


@pytest.mark.parametrize(
    "key", ["model.typo", "model.moe.router.bias_gama", "optim.larning_rate", "data.path", "sed"]
)
def test_an_unknown_key_is_refused_by_struct_mode(compose_train: Compose, key: str) -> None:
    with pytest.raises(ConfigCompositionException, match=key):
        compose_train(f"{key}=1")


def test_one_path_may_stand_for_a_list_of_one(compose_train: Compose) -> None:
    assert read_options(compose_train("data.paths=a.txt"), []).data.paths == ("a.txt",)


def test_evaluate_leaves_data_to_the_checkpoint_and_knows_no_model() -> None:
    register_groups("evaluate")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("evaluate", overrides=["ckpt_path=x"])
    assert all(OmegaConf.is_missing(config.data, name) for name in config.data)
    assert "model" not in config
    assert "optim" not in config


def test_the_help_lists_every_preset_and_experiment() -> None:
    text = list_groups("train", CONF)
    assert all(name in text for name in [*PRESETS, *EXPERIMENTS, "trainer: cpu, gpu"])


def test_conf_is_found_inside_an_installed_package_first_and_beside_it_in_a_clone(
    tmp_path: Path,
) -> None:
    package = tmp_path / "lightning_moe"
    for folder in (package / "conf", tmp_path / "conf"):
        folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no folder conf with a train\.yaml"):
        find_conf(package)
    (tmp_path / "conf" / "train.yaml").touch()
    assert find_conf(package) == tmp_path / "conf"
    (package / "conf" / "train.yaml").touch()
    assert find_conf(package) == package / "conf"
