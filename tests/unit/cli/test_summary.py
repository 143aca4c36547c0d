"""The scores at the end: what the model's was measured on."""

from pathlib import Path

import pytest

from lightning_moe.cli import main, train
from lightning_moe.cli.summary import print_scores
from lightning_moe.data import TokenDataModule


@pytest.mark.parametrize(("limit", "is_part"), [(1, True), (0.5, True), (1.0, False)])
def test_one_batch_is_a_part_and_a_share_of_one_is_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int | float, *, is_part: bool
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 40)
    data = TokenDataModule.from_text(
        str(tmp_path / "a.txt"), sequence_length=16, batch_size=2, val_fraction=0.5
    )
    data.setup("validate")
    print_scores(data, 1.0, limit)
    caption = f"part only: trainer.limit_val_batches={limit}"
    assert (caption in " ".join(capsys.readouterr().out.split())) == is_part


def test_compiling_is_announced_before_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("the quick brown fox " * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_fit", stop)
    small = ("data.paths=[a.txt]", "data.sequence_length=16", "data.val_fraction=0.5")
    for backend, is_told in (("aot_eager", True), ("none", False)):
        assert main(["train", *small, "model.num_layers=2", f"model.compile={backend}"]) == 130
        told = f"model.compile={backend}: the first micro-batch compiles"
        assert (told in capsys.readouterr().out) == is_told
