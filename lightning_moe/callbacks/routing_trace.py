"""To which experts each token went, in a few chosen steps, on disk."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L

from lightning_moe.callbacks.route_files import (
    RouteKey,
    Routes,
    rank_path,
    read_routes,
    write_routes,
)
from lightning_moe.callbacks.step_statistics import missing_records, moe_layers
from lightning_moe.nn import MoE, Routing, TokenRoutes
from lightning_moe.optim import window_of


class RoutingTrace(L.Callback):
    """Writes routes, weights and margins of every token of some optimizer steps; results of the run stay the same.

    Each rank writes one file of what it saw itself, per micro-batch and layer, when the last of the steps is done or
    the run ends otherwise. `lightning-moe routes-diff A B` compares two runs.

    Args:
        steps: optimizer steps, counted from 0 as in `metrics.csv`.
        layers: MoE layers, counted from 0; None takes all.
        path: of the files, below the trainer's root folder: `routes.npz` is `routes-rank0.npz` on rank 0.

    Raises:
        ValueError: if a step or a layer can't be reached; at the start of fit where only then is it known.
    """

    def __init__(
        self, steps: Sequence[int], *, layers: Sequence[int] | None = None, path: str = "routes.npz"
    ) -> None:
        if not steps or min(steps) < 0:
            raise ValueError(f"RoutingTrace: steps={list(steps)} must name steps from 0 on")
        if layers is not None and not layers:
            raise ValueError("RoutingTrace: layers=[] traces nothing; leave it out to trace all")
        if Path(path).suffix != ".npz":
            raise ValueError(f"RoutingTrace: path={path!r} must end in .npz")
        self.steps = frozenset(steps)
        self.layers = layers
        self.path = path
        self._layers: list[MoE] = []
        self._traced: dict[int, MoE] = {}
        self._seen: tuple[TokenRoutes | None, ...] = ()
        self._records: dict[RouteKey, Routes] = {}
        self._step = self._micro_batch = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers; keep what an interrupted run wrote before the step that this one resumes at."""
        self._layers = moe_layers(pl_module, "RoutingTrace")
        every = range(len(self._layers))
        wanted = every if self.layers is None else sorted(set(self.layers))
        if unknown := [layer for layer in wanted if layer not in every]:
            raise ValueError(
                f"RoutingTrace: layers={unknown} don't exist: the module has MoE layers 0 to {every[-1]}"
            )
        self._traced = {layer: self._layers[layer] for layer in wanted}
        first, end = trainer.global_step, trainer.max_steps
        if max(self.steps) < first or 0 <= end <= max(self.steps):
            raise ValueError(
                f"RoutingTrace: steps={sorted(self.steps)} can't all be reached: this run starts at step {first} "
                f"and ends at trainer.max_steps={end}, before which {end - 1} is the last"
            )
        self._step = self._micro_batch = -1
        self._records = {}
        if (window := window_of(pl_module)) is not None:
            window.observers.append(self._observe)
        path = self._path(trainer)
        if first and path.exists():
            self._records = {
                key: routes for key, routes in read_routes(path).items() if key.step < first
            }

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Ask the routers for routes, if this micro-batch belongs to a chosen step."""
        is_same_step = trainer.global_step == self._step
        self._micro_batch = self._micro_batch + 1 if is_same_step else 0
        self._step = trainer.global_step
        if self._step in self.steps:
            self._switch(on=True)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Keep the routes of the micro-batch; write after the last one of the last step."""
        if self._step not in self.steps:
            return
        self._switch(on=False)
        if len(self._seen) != len(self._layers):
            raise missing_records(pl_module, len(self._layers), len(self._seen), "RoutingTrace")
        for layer in self._traced:
            if (tokens := self._seen[layer]) is not None:
                key = RouteKey(step=self._step, micro_batch=self._micro_batch, layer=layer)
                self._records[key] = Routes.of(tokens)
        self._seen = ()
        if self._step == max(self.steps) and trainer.global_step > self._step:
            self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The data may end before the last of the steps."""
        self._end(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """What was seen so far may say why."""
        self._switch(on=False)
        self._end(trainer, pl_module)

    def _observe(self, records: Sequence[Routing]) -> None:
        if self._step in self.steps:
            self._seen = tuple(record.tokens for record in records)

    def _end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (window := window_of(pl_module)) is not None:
            window.observers = [seen for seen in window.observers if seen != self._observe]
        self._seen = ()
        self._write(trainer)

    def _switch(self, *, on: bool) -> None:
        for layer in self._traced.values():
            layer.router.trace = on

    def _path(self, trainer: L.Trainer) -> Path:
        return rank_path(Path(trainer.default_root_dir) / self.path, trainer.global_rank)

    def _write(self, trainer: L.Trainer) -> None:
        if self._records and not getattr(trainer, "fast_dev_run", False):
            write_routes(self._path(trainer), self._records)
            self._records = {}
