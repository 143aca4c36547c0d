"""Writes to disk to which experts each token went in a few chosen steps."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_moe.callbacks.diagnosis import TraceSwitch, not_fatal
from lightning_moe.callbacks.step_reader import missing_records, required_layers
from lightning_moe.metrics.token_routes import (
    RouteKey,
    Routes,
    later_ranks,
    rank_path,
    read_routes,
    write_routes,
)
from lightning_moe.nn import MoE, Routing, TokenRoutes
from lightning_moe.step import window_of


class RoutingTrace(L.Callback):
    """Writes routes, weights and margins of every token of some optimizer steps; results of the run stay the same.

    Each rank writes one file of what it saw itself, per micro-batch and layer, when the last of the steps is done or
    the run ends otherwise. `lightning-moe routes-diff A B` compares two runs. Files of ranks that only an earlier run
    had are deleted at the start. Steps that were not reached, and files that can't be written, are warned of.

    Args:
        steps: optimizer steps, counted from 0; what several optimizers do in one batch is one step.
        layers: MoE layers, counted from 0; None takes all.
        path: of the files, below the trainer's root folder: `routes.npz` is `routes-rank0.npz` on rank 0.

    Raises:
        ValueError: if an option is of another kind, or a step or a layer can't be reached; at the start of fit where
            only then is it known.
    """

    def __init__(
        self, steps: Sequence[int], *, layers: Sequence[int] | None = None, path: str = "routes.npz"
    ) -> None:
        if not _is_numbers(steps):
            raise ValueError(
                f"RoutingTrace: steps={steps!r} must be a list that names steps from 0 on, such as [0, 10]"
            )
        if layers is not None and not _is_numbers(layers):
            raise ValueError(
                f"RoutingTrace: layers={layers!r} must be a list that names layers from 0 on; leave it out to trace all"
            )
        if not isinstance(path, str) or Path(path).suffix != ".npz":
            raise ValueError(f"RoutingTrace: path={path!r} must end in .npz")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(
                f"RoutingTrace: path={path!r} must stay below the trainer's root folder; give a relative path"
            )
        self.steps = frozenset(steps)
        self.layers = layers
        self.path = path
        self._layers: list[MoE] = []
        self._traced: dict[int, MoE] = {}
        self._trace = TraceSwitch()
        self._seen: tuple[TokenRoutes | None, ...] = ()
        self._records: dict[RouteKey, Routes] = {}
        self._step = self._micro_batch = self._global_step = 0
        self._is_listening = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers; keep what an interrupted run wrote before the step that this one resumes at."""
        self._layers = required_layers(pl_module, "RoutingTrace")
        every = range(len(self._layers))
        wanted = every if self.layers is None else sorted(set(self.layers))
        if unknown := [layer for layer in wanted if layer not in every]:
            raise ValueError(
                f"RoutingTrace: layers={unknown} don't exist: the module has MoE layers 0 to {every[-1]}"
            )
        self._traced = {layer: self._layers[layer] for layer in wanted}
        self._trace = TraceSwitch(list(self._traced.values()))
        first, end = trainer.global_step // max(1, len(trainer.optimizers)), trainer.max_steps
        if max(self.steps) < first or 0 <= end <= max(self.steps):
            raise ValueError(
                f"RoutingTrace: steps={sorted(self.steps)} can't all be reached: this run starts at step {first} "
                f"and ends at trainer.max_steps={end}, before which {end - 1} is the last"
            )
        self._step, self._micro_batch, self._global_step = first, -1, trainer.global_step
        self._records = self._earlier(trainer, first)
        self._is_listening = True
        if (window := window_of(pl_module)) is not None:
            window.observers.append(self._observe)

    def _earlier(self, trainer: L.Trainer, first: int) -> dict[RouteKey, Routes]:
        """Routes of the steps before `first` of an interrupted run; files of ranks that are gone are deleted."""
        path = self._path(trainer)
        kept: dict[RouteKey, Routes] = {}
        with not_fatal(f"RoutingTrace: going on with {path}"):
            if trainer.is_global_zero:
                for stale in later_ranks(path, trainer.world_size):
                    stale.unlink()
            if first and path.exists():
                kept = {key: seen for key, seen in read_routes(path).items() if key.step < first}
        missed = {step for step in self.steps if step < first} - {key.step for key in kept}
        if missed:
            rank_zero_warn(
                f"RoutingTrace: steps={sorted(missed)} are not traced: this run starts at step {first}"
            )
        return kept

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Switch tracing on, if this micro-batch belongs to a chosen step."""
        self._micro_batch += 1
        if self._step in self.steps:
            self._trace.on()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Keep the routes of the micro-batch; write after the last one of the last step."""
        self._trace.off()
        if self._step in self.steps:
            self._keep(pl_module)
        if trainer.global_step == self._global_step:
            return
        if self._step == max(self.steps):
            self._write(trainer)
        self._step, self._micro_batch, self._global_step = self._step + 1, -1, trainer.global_step

    def _keep(self, pl_module: L.LightningModule) -> None:
        if len(self._seen) != len(self._layers):
            raise missing_records(pl_module, len(self._layers), len(self._seen), "RoutingTrace")
        for layer in self._traced:
            if (tokens := self._seen[layer]) is not None:
                key = RouteKey(step=self._step, micro_batch=self._micro_batch, layer=layer)
                self._records[key] = Routes.of(tokens)
        self._seen = ()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what was traced; warn if the data ended before the last chosen step."""
        if unreached := [step for step in sorted(self.steps) if step >= self._step]:
            rank_zero_warn(
                f"RoutingTrace: steps={unreached} were not reached: training ended before step {self._step}"
            )
        self._end(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Write what was traced before the error."""
        self._trace.off()
        if self._is_listening:
            self._end(trainer, pl_module)

    def _observe(self, records: Sequence[Routing]) -> None:
        if self._step in self.steps:
            self._seen = tuple(record.tokens for record in records)

    def _end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (window := window_of(pl_module)) is not None:
            window.observers = [seen for seen in window.observers if seen != self._observe]
        self._seen = ()
        self._is_listening = False
        self._write(trainer)

    def _path(self, trainer: L.Trainer) -> Path:
        return rank_path(Path(trainer.default_root_dir) / self.path, trainer.global_rank)

    def _write(self, trainer: L.Trainer) -> None:
        if self._records and not getattr(trainer, "fast_dev_run", False):
            with not_fatal(f"RoutingTrace: writing {self._path(trainer)}"):
                write_routes(self._path(trainer), self._records)
            self._records = {}


def _is_numbers(values: object) -> bool:
    """Whether it is a sequence of at least one whole number, none below 0."""
    return (
        isinstance(values, Sequence)
        and len(values) > 0
        and all(type(value) is int and value >= 0 for value in values)
    )
