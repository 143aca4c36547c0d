"""What loggers get, and when."""

from lightning.pytorch.loggers.logger import Logger


class StepLogger(Logger):
    """The names that loggers get, and at which step."""

    name = version = "steps"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, list[str]]] = []

    def log_hyperparams(self, *_: object) -> None:
        """None."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.steps.append((step, sorted(metrics)))
