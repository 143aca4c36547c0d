"""A checkpoint that can't be used as asked is refused, by name."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_moe import MoEModule
from lightning_moe.cli.checkpoints import (
    WholeFiles,
    check_fits,
    check_resumable,
    read_checkpoint,
)
from lightning_moe.cli.errors import show_error
from lightning_moe.cli.run_config import RunConfig
from lightning_moe.config import OptimConfig, TransformerConfig, to_mapping
from lightning_moe.config.data import DataConfig
from tests.kit.runs import tiny_config

SAVED = {
    "global_step": 7,
    "hyper_parameters": {
        "config": to_mapping(TransformerConfig.preset("tiny")),
        "optim": to_mapping(OptimConfig(lr=0.5)),
    },
}


def _resume(max_steps: int = 8, words: tuple[str, ...] = (), **optim: object) -> dict[str, str]:
    options = RunConfig(
        model=TransformerConfig.preset("tiny"),
        optim=OptimConfig(**{"lr": 0.5} | optim),
        data=DataConfig(),
    )
    return check_resumable(SAVED, "ckpt_path=x", options, max_steps=max_steps, words=words)


@pytest.mark.parametrize("keep", [0, 10, 900])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.ckpt"
    torch.save({"state_dict": {"weight": torch.zeros(50)}}, path)
    content = path.read_bytes()
    assert len(content) > 900
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"ckpt_path=.*cut\.ckpt can't be read as a checkpoint"):
        read_checkpoint(str(path), "ckpt_path")


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="no Lightning checkpoint: it has no state_dict"):
        read_checkpoint(str(tmp_path / "other.ckpt"), "init_from")


def test_a_resume_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"trainer\.max_steps=7 is reached: ckpt_path=x was saved at step 7"
    ):
        _resume(max_steps=7)
    assert _resume(max_steps=8) == _resume(max_steps=-1) == {}


def test_a_learning_rate_that_the_checkpoint_overrides_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"optim\.lr=0\.25 has no effect when ckpt_path=x is resumed.* 0\.5"
    ):
        _resume(lr=0.25, words=("optim.lr=0.25",))


def test_an_option_that_was_not_given_again_is_refused_if_it_would_change() -> None:
    message = (
        r"optim\.schedule=cosine is not what ckpt_path=x was trained with, constant; give "
        r"optim\.schedule=constant to go on as before, or optim\.schedule=cosine to change it"
    )
    for words in ((), ("optim.warmup=3", "model=tiny")):
        with pytest.raises(ValueError, match=message):
            _resume(schedule="cosine", words=words)


@pytest.mark.parametrize("word", ["optim.schedule=cosine", "+optim={a: 1}", "experiment=x"])
def test_what_is_given_differently_is_told(word: str) -> None:
    changes = _resume(schedule="cosine", words=(word,))
    assert changes == {"optim.schedule": "cosine instead of constant"}


def test_a_file_that_finds_no_room_leaves_the_earlier_one_and_says_so_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "best.ckpt"
    WholeFiles().save_checkpoint({"weight": torch.zeros(3)}, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What a full disk does, to this process alone.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            OSError, match=r"best\.ckpt can't be written \(.*\); is the disk full"
        ) as end:
            WholeFiles().save_checkpoint({"weight": torch.zeros(10_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"best.ckpt": before}
    show_error(end.value)
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_the_machine_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left") as end:
        Path("/dev/full").write_text("x")
    show_error(end.value)
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_weights_of_another_model_are_refused() -> None:
    model = tiny_config()
    check_fits(model, {"state_dict": MoEModule(model).state_dict()}, "x")
    smaller = MoEModule(replace(model, vocab_size=7)).state_dict()
    with pytest.raises(
        ValueError,
        match=r"x holds another model: model\.embedding\.weight has shape \(7, 16\) there and \(11, 16\) here",
    ):
        check_fits(model, {"state_dict": smaller}, "x")
    with pytest.raises(ValueError, match=r"has shape none there"):
        check_fits(model, {"state_dict": {}}, "x")
