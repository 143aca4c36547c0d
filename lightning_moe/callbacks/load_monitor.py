"""Counts tokens per layer, expert and rank: logs, draws and records them, and warns of token gerrymandering."""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_moe.callbacks.diagnosis import TraceSwitch, not_fatal
from lightning_moe.callbacks.load_pictures import save_pictures, show_pictures
from lightning_moe.callbacks.load_values import WORST, layer_values
from lightning_moe.callbacks.step_reader import StepReader
from lightning_moe.config.checks import AT_LEAST_ONE, check_bools, check_ints, given
from lightning_moe.metrics.gerrymandering import (
    GerrymanderingAlarm,
    LayerHealth,
    can_be_fooled,
    layer_health,
    warning,
)
from lightning_moe.metrics.routing_history import HISTORY_FILE, RoutingHistory, append_entry
from lightning_moe.metrics.routing_sums import RoutingSums, history_entry
from lightning_moe.nn import MoE
from lightning_moe.ops.load import load_max_over_mean, of_layers
from lightning_moe.step import window_of
from lightning_moe.strategy import ExpertParallelStrategy


class ExpertLoadMonitor(L.Callback):
    """Logs how tokens are spread over experts, keeps a history of it, and warns of token gerrymandering.

    Logged at every step: `train/load_max_over_mean`, the busiest expert over the mean in the worst layer (1 is even, E
    is everything on one expert), from that step's counts over all micro-batches and ranks. Logged every
    `every_n_steps`, each also by layer as `<key>/layer_<i>` (i counts MoE layers): the same, and over all steps since
    the last time

    - `train/dead_experts`: share of experts that nothing was asked of;
    - `train/balance_inner_product`: balance loss of all these tokens minus 1; below 0, experts with less score win;
    - `train/router_margin`: mean margin of the choice (see `ops.TokenRoutes`), in the last step alone, unless routers
      trace without being asked;
    - `train/dropped_routes`, `train/lost_tokens`: shares, where the dispatcher can drop;
    - `train/rank_load_max_over_mean`: of the copies that each rank computes, where there are several ranks;
    - `train/gerrymandered_layers`: how many layers `GerrymanderingAlarm` suspects; not by layer.

    Without a layer a key is the worst layer's value. Ranks exchange one message every `every_n_steps`, none between.
    Loggers get these values at that step only, whatever `log_every_n_steps` is; with 0 they get none.
    The trainer's root folder gets `routing_history.npz` (`read_history`) at every validation and at the end, and then
    `expert_load.png` (layers x experts) and `expert_load_history.png` (layers x steps); loggers that take pictures get
    them as well. A resumed run goes on with the history in its folder, and with its suspicions; one that is damaged, or
    of another model, is replaced with a warning. Files that can't be written are warned of and don't end training.

    Args:
        every_n_steps: None takes the trainer's `log_every_n_steps`.
        recent_steps: the picture of the experts shows at least so many last steps.
        alarm: warn, once per episode, when the balance loss is low although the load is bad.
        write_files: off, nothing is written or drawn.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is below 1; at the start of training, if the module has no MoE layer.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        recent_steps: int = 100,
        alarm: bool = True,
        write_files: bool = True,
    ) -> None:
        check_ints(
            "ExpertLoadMonitor",
            AT_LEAST_ONE,
            recent_steps=recent_steps,
            **given(every_n_steps=every_n_steps),
        )
        check_bools("ExpertLoadMonitor", alarm=alarm, write_files=write_files)
        self.every_n_steps = every_n_steps
        self.recent_steps = recent_steps
        self.alarm = alarm
        self.write_files = write_files
        self._layers: list[MoE] = []
        self._entries: list[RoutingHistory] = []
        self._sums: RoutingSums | None = None
        self._trace = TraceSwitch()

    # ---- counting --------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the layers."""
        self._reader = StepReader(pl_module, "ExpertLoadMonitor")
        self._layers = self._reader.layers
        self._trace = TraceSwitch(self._layers)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Observe the routing records; go on with the history of a resumed run."""
        self._watch = GerrymanderingAlarm(len(self._layers))
        # The Trainer's logger connector gives it that attribute; 0 turns the loggers off.
        self._log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._every = self.every_n_steps or self._log_every or 50
        # Counted down: several optimizers move global_step several times per step.
        self._steps_left = self._every - trainer.global_step % self._every
        self._requested: Sequence[Tensor] = ()
        self._num_steps = 0
        self._sums = RoutingSums(
            [layer.config.num_experts for layer in self._layers],
            _expert_ranks(trainer),
            trainer.world_size,
            pl_module.device,
        )
        if (window := window_of(pl_module)) is not None:
            window.observers.append(self._sums.observe)
        if trainer.global_step:
            self._resume(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Switch tracing on in the steps that end an entry, for margins."""
        if self._steps_left == 1:
            self._trace.on()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Count this step, unless it was counted, by a second optimizer or an earlier call of the closure."""
        statistics = self._reader.new_step(trainer, pl_module)
        assert self._sums is not None
        self._sums.end_step(keep=statistics is not None)
        if statistics is None:
            return
        # Logged from the host: a progress bar reads every logged value once per micro-batch.
        new = statistics.on_host().requested
        self._requested = (
            [total + counts for total, counts in zip(self._requested, new, strict=True)]
            if self._num_steps
            else new
        )
        self._num_steps += 1
        self._steps_left -= 1
        ratios = of_layers(load_max_over_mean, new)
        pl_module.log("train/load_max_over_mean", ratios.max(), prog_bar=True)
        if not self._steps_left:
            self._steps_left = self._every
            entry = self._end_entry(trainer, trainer.global_step)
            self._log(trainer, entry, {"load_max_over_mean": ratios})

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Switch tracing off."""
        self._trace.off()

    def _end_entry(self, trainer: L.Trainer, step: int) -> RoutingHistory:
        """The steps since the last entry; every rank calls it."""
        assert self._sums is not None
        packed = trainer.strategy.reduce(self._sums.pack(), reduce_op="sum")
        layers = self._sums.unpack(packed, self._requested)
        entry = history_entry(step, self._num_steps, layers)
        self._requested, self._num_steps = (), 0
        if self._writes(trainer):
            append_entry(self._entries, entry)
        return entry

    def _log(self, trainer: L.Trainer, entry: RoutingHistory, of_step: dict[str, Tensor]) -> None:
        assert self._sums is not None
        values = layer_values(entry, [layer.config.router.top_k for layer in self._layers])
        if not self._sums.drops:
            del values["dropped_routes"], values["lost_tokens"]
        if trainer.world_size == 1:
            del values["rank_load_max_over_mean"]
        by_key: dict[str, Tensor | float] = {}
        for name, by_layer in (of_step | values).items():
            known = by_layer.isfinite()
            if name not in of_step and known.any():
                by_key[name] = WORST.get(name, torch.max)(by_layer[known])
            by_key |= {f"{name}/layer_{i}": by_layer[i] for i in known.nonzero().flatten().tolist()}
        if self.alarm:
            health = [layer_health(layer)[0] for layer in entry.layers]
            if self._watch.begins(self._judged(health)):
                rank_zero_warn(warning(trainer.global_step, self._watch.suspicious, health))
            by_key["gerrymandered_layers"] = float(len(self._watch.suspicious))
        logged = {f"train/{key}": torch.as_tensor(value) for key, value in by_key.items()}
        # Through the module they would be handled, and repeated to loggers, at every later step.
        trainer.callback_metrics.update(logged)
        if self._log_every:
            numbers = {key: value.item() for key, value in logged.items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _judged(self, health: Sequence[LayerHealth]) -> list[LayerHealth | None]:
        return [
            seen if can_be_fooled(layer.config.router) else None
            for seen, layer in zip(health, self._layers, strict=True)
        ]

    def _resume(self, trainer: L.Trainer) -> None:
        """Go on with the history in the folder; every rank calls it."""
        if self._writes(trainer):
            self._entries = self._earlier(trainer)
        seen = [layer_health(layer) for layer in RoutingHistory.joined(self._entries).layers]
        for health in zip(*trainer.strategy.broadcast(seen), strict=True):
            self._watch.begins(self._judged(health))

    def _earlier(self, trainer: L.Trainer) -> list[RoutingHistory]:
        path = _folder(trainer) / HISTORY_FILE
        if not path.exists():
            return []
        try:
            history = RoutingHistory.read(path)
            if self._describes(history):
                return history.before(trainer.global_step).entries()
            problem = f"{path} is of a model with other MoE layers"
        except (OSError, ValueError) as error:
            problem = str(error)
        rank_zero_warn(
            f"ExpertLoadMonitor starts a new history at step {trainer.global_step}: {problem}"
        )
        return []

    def _describes(self, history: RoutingHistory) -> bool:
        own = [layer.config.num_experts for layer in self._layers]
        return [layer.num_experts for layer in history.layers] == own

    # ---- files -----------------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the history, in case the run is killed later."""
        if not trainer.sanity_checking:
            with not_fatal(f"ExpertLoadMonitor: writing to {_folder(trainer)}"):
                self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the last entry, which may have fewer steps than others."""
        if self._num_steps:
            self._end_entry(trainer, trainer.global_step - 1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the history and draw it."""
        self._finish(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Write what was counted before the error, and stop observing."""
        self._trace.off()
        self._finish(trainer)
        self._forget(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop observing, and drop the entries of this run."""
        self._forget(pl_module)

    def _forget(self, pl_module: L.LightningModule) -> None:
        self._entries = []
        window = window_of(pl_module)
        if window is not None and self._sums is not None:
            window.observers = [seen for seen in window.observers if seen != self._sums.observe]
            self._sums = None

    def _writes(self, trainer: L.Trainer) -> bool:
        in_earnest = not getattr(trainer, "fast_dev_run", False)
        return self.write_files and trainer.is_global_zero and in_earnest

    def _write(self, trainer: L.Trainer) -> RoutingHistory:
        history = RoutingHistory.joined(self._entries)
        if len(history):
            history.write(_folder(trainer) / HISTORY_FILE)
        return history

    def _finish(self, trainer: L.Trainer) -> None:
        if self._entries:
            with not_fatal(f"ExpertLoadMonitor: writing to {_folder(trainer)}"):
                history = self._write(trainer)
                pictures = save_pictures(history, self.recent_steps, _folder(trainer))
                show_pictures(pictures, trainer.loggers, trainer.global_step)


def _folder(trainer: L.Trainer) -> Path:
    return Path(trainer.default_root_dir)


def _expert_ranks(trainer: L.Trainer) -> Sequence[int]:
    """The ranks that compute this rank's tokens, in the order of their experts."""
    strategy = trainer.strategy
    if isinstance(strategy, ExpertParallelStrategy) and strategy.mesh is not None:
        return strategy.mesh.ep.ranks
    return (trainer.global_rank,)
