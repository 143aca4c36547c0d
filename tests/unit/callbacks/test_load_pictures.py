"""The load monitor's heat maps: drawn at the end, and given to loggers that take pictures."""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_moe.callbacks import ExpertLoadMonitor
from tests.kit.modules import Scripted
from tests.kit.monitored import RECORDS, fit


def test_a_heat_map_is_drawn_at_the_end(tmp_path: Path) -> None:
    fit(tmp_path, Scripted(RECORDS), 3, callbacks=[ExpertLoadMonitor()])
    assert (tmp_path / "expert_load.png").read_bytes().startswith(b"\x89PNG")


def test_a_fit_without_a_step_draws_nothing(tmp_path: Path) -> None:
    fit(tmp_path, Scripted(RECORDS), 3, callbacks=[ExpertLoadMonitor()], max_steps=0)
    assert not (tmp_path / "expert_load.png").exists()


class _ImageLogger(CSVLogger):
    """Takes pictures as W&B's logger does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.images: list[tuple[str, list[str]]] = []

    def log_image(self, key: str, images: list[str], step: int | None = None) -> None:
        self.images.append((key, [Path(image).name for image in images]))


def test_loggers_that_take_pictures_get_them(tmp_path: Path) -> None:
    board, images = TensorBoardLogger(tmp_path / "board"), _ImageLogger(tmp_path / "csv")
    plain = CSVLogger(tmp_path / "plain")
    monitor = ExpertLoadMonitor(every_n_steps=2)
    fit(tmp_path, Scripted(RECORDS), 4, callbacks=[monitor], logger=[board, images, plain])
    pictures = ["expert_load", "expert_load_history"]
    assert images.images == [(f"train/{name}", [f"{name}.png"]) for name in pictures]
    assert all((tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG" for name in pictures)
    (events,) = Path(board.log_dir).glob("events*")
    assert all(f"train/{name}".encode() in events.read_bytes() for name in pictures)
