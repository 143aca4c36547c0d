"""The scores at the end: what the model's was measured on."""

from pathlib import Path

import pytest

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
