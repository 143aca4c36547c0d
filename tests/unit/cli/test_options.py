"""The list of options is complete, and shells complete from it."""

import subprocess

import pytest
from omegaconf import OmegaConf

from lightning_moe.cli import main
from lightning_moe.cli.groups import find_conf
from lightning_moe.cli.options import all_options
from tests.unit.cli.conftest import Compose


def test_every_option_that_hydra_knows_is_listed_with_what_it_does(compose_train: Compose) -> None:
    config = compose_train("strategy=expert_parallel", "callbacks=[default,ema,early_stopping]")
    listed = {option.name: option for option in all_options(find_conf())}
    known = set(_leaves(OmegaConf.to_container(config), ""))
    assert {name for name in known if name not in listed} == set()
    assert [name for name, option in listed.items() if not option.doc] == []
    # Those of sections that are not set by default, too.
    assert "model.moe.latent.latent_dim" in listed


def _leaves(node: object, name: str) -> list[str]:
    if isinstance(node, dict) and node:
        inner = ((key, value) for key, value in node.items() if key != "_target_")
        return [
            leaf for key, value in inner for leaf in _leaves(value, f"{name}.{key}".lstrip("."))
        ]
    return [name]


def test_a_section_shows_default_choices_and_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["options", "model.moe.router"]) == 0
    text = capsys.readouterr().out
    assert "model.moe.router.top_k=2  (int)\n    experts per token" in text
    assert "gating_function=softmax  (softmax | topk_softmax | sigmoid)" in text
    assert "optim." not in text
    assert main(["options", "trainer.max_steps"]) == 0
    assert capsys.readouterr().out == "trainer.max_steps=1000\n    Optimizer steps.\n"


def test_an_unknown_section_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "model.moe.ruoter"]) == 2
    assert "did you mean model.moe.router?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lightning-moe ev", ["evaluate"]),
        ("lightning-moe train optim.warm", ["optim.warmup="]),
        # bash takes "=" for the end of a word.
        ("lightning-moe train experiment=tiny_e", ["tiny_ep2_cpu"]),
    ],
)
def test_bash_completes_commands_options_and_choices(
    capsys: pytest.CaptureFixture[str], line: str, expected: list[str]
) -> None:
    assert main(["options", "--completion", "bash"]) == 0
    script = capsys.readouterr().out
    cword = len(line.split()) - 1
    ask = f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_CWORD={cword}; _lightning_moe'
    command = ["bash", "-c", f'{script}\n{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_zsh_takes_the_same_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "--completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")
