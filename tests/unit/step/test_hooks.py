"""Who closes an optimizer step, and when."""

import ast

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback

from lightning_moe.step.hooks import StepCloser, close_steps
from tests.style.source import walk_package


class _Reads(L.Callback):
    def on_before_optimizer_step(self, *_: object) -> None:
        pass


def _names(*callbacks: L.Callback) -> list[str]:
    options = {"enable_checkpointing": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        accelerator="cpu", callbacks=list(callbacks), enable_progress_bar=False, **options
    )
    for _ in range(2):
        close_steps(trainer)
    return [type(callback).__name__ for callback in trainer.callbacks]


def test_steps_are_closed_once_before_the_first_callback_that_sees_gradients() -> None:
    plain, by_lambda = L.Callback(), LambdaCallback(on_before_optimizer_step=lambda *_: None)
    closer = StepCloser.__name__
    assert _names(_Reads()) == [closer, "_Reads"]
    assert _names(plain, _Reads()) == ["Callback", closer, "_Reads"]
    assert _names(by_lambda, _Reads()) == [closer, "LambdaCallback", "_Reads"]
    # Lightning's learning-rate finder looks for its own callback at the first place.
    assert _names(plain) == ["Callback", closer]


def test_one_place_in_the_package_closes_steps() -> None:
    callers = [
        path.as_posix()
        for path, node in walk_package()
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "close_window"
    ]
    assert callers == ["lightning_moe/step/hooks.py"]
