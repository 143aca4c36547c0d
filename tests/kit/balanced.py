"""The documented recipe for a balance scope in a module of one's own, and its fits."""

from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from lightning_moe import StepHooks, TokenBatch, step_router_losses
from lightning_moe.callbacks import RouterBiasCorrection
from lightning_moe.nn import Routing
from tests.kit.modules import OwnModule
from tests.kit.runs import (
    make_batches,
    make_loader,
    make_trainer,
)

LENGTHS = [(8, 3), (1, 5), (7, 2), (2, 2), (6, 4), (3, 8)]


class Windowless(OwnModule):
    """The documented recipe without its hooks."""

    def __init__(self, scope: str = "exact", **router: object) -> None:
        super().__init__(lb_loss_weight=2.0, lb_loss_scope=scope, **router)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        total, num_tokens, routing = self.loss_sum(batch)
        auxiliary = step_router_losses(self, [routing])
        return self.window.add(total + auxiliary.total, num_tokens, [routing])

    def routing_step(self, batch: TokenBatch, batch_idx: int) -> list[Routing]:
        return [self.loss_sum(batch)[2]]


class Balanced(StepHooks, Windowless):
    """The documented recipe."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.window.nominal_tokens = 7


def fit(
    folder: Path, module: OwnModule, data: Dataset[TokenBatch] | None = None, **options: object
) -> dict[str, Tensor]:
    """The whole state after steps of two micro-batches each, in float64 unless told otherwise."""
    options = {"callbacks": [RouterBiasCorrection()], "precision": "64-true"} | options
    trainer = make_trainer(folder, accumulate_grad_batches=2, **options)
    loader = make_loader(make_batches(LENGTHS) if data is None else data)
    trainer.fit(module, loader)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
