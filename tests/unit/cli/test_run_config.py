"""What would silently do nothing is refused, by name."""

from dataclasses import replace

import pytest

from lightning_moe.cli.run_config import read_options
from tests.unit.cli.conftest import Compose

NO_EXPERTS = ("model.moe=null", "callbacks=dense")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+model.typo=1"], r"model\.typo is not an option"),
        (["+model.moe.router.bias_gama=1"], r"did you mean model\.moe\.router\.bias_gamma\?"),
        (["data.vocab_size=300"], r"data\.vocab_size=300 differs from model\.vocab_size=264"),
        (["model.num_dense_layers=4"], r"model\.moe has no effect: no layer uses it"),
        (["model.moe=null"], r"callbacks\.expert_load watches experts"),
        ([*NO_EXPERTS, "optim.router_lr_scale=2"], r"optim\.router_lr_scale=2\.0 has no effect"),
        (
            ["model.num_dense_layers=0", "model.dense_hidden_size=8"],
            r"model\.dense_hidden_size=8 has no effect",
        ),
        (["ckpt_path=a", "init_from=b"], "give one of the two"),
        (["trainer.max_steps=-1"], "never end"),
        (
            ["optim.schedule=wsd", "optim.decay=9", "trainer.max_steps=8"],
            r"don't fit into trainer\.max_steps=8",
        ),
        (["optim.min_lr_ratio=0.1"], r"optim\.min_lr_ratio=0\.1 has no effect"),
    ],
)
def test_refused(compose_train: Compose, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(compose_train(*overrides), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        NO_EXPERTS,
        ("model.num_dense_layers=0",),
        # Its one MoE layer differs from model.moe, and has the rest of its options from there.
        ("model.num_dense_layers=3", "+model.layer_overrides.3.moe.router.top_k=1"),
        ("model.num_dense_layers=2", "model.dense_hidden_size=8"),
        ("optim.schedule=wsd", "optim.decay=8", "trainer.max_steps=8"),
    ],
)
def test_accepted(compose_train: Compose, overrides: tuple[str, ...]) -> None:
    read_options(compose_train(*overrides), overrides)


def test_one_option_of_one_layer_leaves_the_others_as_they_are(compose_train: Compose) -> None:
    overrides = ("model.num_dense_layers=0", "+model.layer_overrides.1.moe.router.bias_gamma=0.25")
    plain, other = (
        read_options(compose_train(*words), words).model for words in (overrides[:1], overrides)
    )
    assert plain.moe.num_experts > 1
    router = replace(plain.moe.router, bias_gamma=0.25)
    assert other.layers[1].feed_forward == replace(plain.moe, router=router)
    assert other.layers[0] == plain.layers[0]
