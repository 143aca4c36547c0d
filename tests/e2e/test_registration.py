"""The strategy's name is known to Lightning however a process was started, and whatever it imports first."""

import os
import subprocess
import sys
from pathlib import Path

_TRAINER = """
import lightning as L
trainer = L.Trainer(strategy="expert_parallel", devices=1, accelerator="cpu", logger=False, enable_checkpointing=False)
assert type(trainer.strategy).__name__ == "ExpertParallelStrategy"
"""

_THIS_PACKAGE_FIRST = """
import sys
import lightning_moe
assert "lightning" not in sys.modules and "torch" not in sys.modules
import lightning.pytorch.strategies as strategies
assert strategies.__spec__.loader is strategies.__loader__
assert type(strategies.__loader__).__name__ == "SourceFileLoader"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_moe")]
"""


def _run(*arguments: str, folder: Path) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_package_that_imports_ours_can_be_run_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import lightning_moe.nn\n")
    (package / "train.py").write_text(_TRAINER)
    _run("-m", "package.train", folder=tmp_path)


def test_our_package_may_be_imported_before_lightning_and_leaves_no_trace_there(
    tmp_path: Path,
) -> None:
    _run("-c", _THIS_PACKAGE_FIRST + _TRAINER, folder=tmp_path)
