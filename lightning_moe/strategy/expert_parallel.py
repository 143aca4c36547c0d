"""Expert parallelism for the Lightning Trainer: the hooks in which several objects take part, in a visible order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final, Literal

import lightning as L
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.checkpoint.checkpoints import Checkpoints
from lightning_moe.nn import moe_layers
from lightning_moe.ops.capacity import Overflow
from lightning_moe.ops.ranges import named_range
from lightning_moe.optim.released import ReleasedWeights, stores_of_released
from lightning_moe.optim.sharded import ShardedState, refuse_foreign_parameters
from lightning_moe.parallel.apply import place
from lightning_moe.parallel.clip import GradientNorm
from lightning_moe.parallel.collectives import ProcessMesh, gather_objects
from lightning_moe.parallel.layout import ParamLayout
from lightning_moe.parallel.mesh import (
    MeshShape,
    check_expert_parallel,
    resolve_expert_parallel,
)
from lightning_moe.parallel.reducer import GradientReducer
from lightning_moe.parallel.replicas import sync_replicas
from lightning_moe.parallel.transports import LargerBatches, Transport, make_transport
from lightning_moe.step.window import divide_ahead
from lightning_moe.strategy.agreement import layer_options, refuse_different, step_options
from lightning_moe.strategy.expert_backends import settle_backends
from lightning_moe.strategy.hooks import RankHooks, there
from lightning_moe.strategy.joint_ends import JointEnds
from lightning_moe.strategy.options import (
    check_options,
    refuse_averaging,
    refuse_lbfgs,
    refuse_mixed_float16,
    refuse_single_files,
    sized_for_data,
)
from lightning_moe.strategy.stop_signal import stop_signals
from lightning_moe.strategy.wrappers import clipping_over_ranks, wrap_optimizers

# Until all ranks have met: they import, compile or wait for a slow disk for longer than a collective may last.
_START_LIMIT: Final = timedelta(minutes=5)


class ExpertParallelStrategy(RankHooks):
    """Experts stay on their ranks and tokens travel; everything else is data parallel with sharded optimizer state.

    Works for any LightningModule with `lightning_moe.nn.MoE` layers, and for one without. Weights, losses and
    gradients are those of one process with the whole batch.

    Args:
        expert_parallel: ranks that share out the experts of a layer; must divide the number of experts and of
            ranks. `auto`: as many as fit into one node.
        dispatcher: `all_to_all` (no token is dropped), `static` (fixed shapes and no host sync; drops in training what
            overflows an expert's capacity), or a transport with its options: `StaticDispatch(capacity_factor=2.0)`.
        capacity_factor, overflow, warmup_tokens, receive_limit: options of the transport where it is given by name.
        distributed_optimizer: split optimizer state over replicas (more than one rank only).
        bucket_mb: size of one gradient message (MiB).
        timeout: how long a collective may take before all ranks give up (at least one second; seconds, or a
            timedelta). A stalled rank then ends the run within ten seconds more. For starting, ranks have five minutes.
        start_method: how Lightning starts processes: `popen`, `spawn`, `fork` or `forkserver`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend:
            as in `DDPStrategy`.

    Raises:
        ValueError: for options that can't work, at once; for sizes that don't fit, on every rank, before a process
            group exists or a weight is changed.
        TypeError: for an option that `DDPStrategy` has and this strategy can't serve, and a value of the wrong type.
    """

    def __init__(  # noqa: PLR0913 - one keyword per option
        self,
        expert_parallel: int | Literal["auto"] = "auto",
        *,
        dispatcher: str | Transport = "all_to_all",
        capacity_factor: float | None = None,
        overflow: Overflow | None = None,
        warmup_tokens: int | None = None,
        receive_limit: int | None = None,
        distributed_optimizer: bool = True,
        bucket_mb: float = 25.0,
        timeout: float | timedelta = 50.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **lightning_options: Any,
    ) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        check_options(
            lightning_options,
            timeout_s=seconds,
            bucket_mb=bucket_mb,
            distributed_optimizer=distributed_optimizer,
            start_method=start_method,
        )
        check_expert_parallel(expert_parallel)
        limit = timedelta(seconds=seconds)
        super().__init__(timeout=limit, start_method=start_method, **lightning_options)
        self.expert_parallel = expert_parallel
        self.transport = make_transport(
            dispatcher,
            capacity_factor=capacity_factor,
            overflow=overflow,
            warmup_tokens=warmup_tokens,
            receive_limit=receive_limit,
        )
        self.distributed_optimizer = distributed_optimizer
        self.bucket_mb = bucket_mb
        self.layout: ParamLayout | None = None
        self.sharded: ShardedState | None = None
        self.reducer: GradientReducer | None = None
        self._larger = LargerBatches()

    # ---- ranks -----------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Check sizes, connect the ranks, share out what there is of the module already."""
        shape = self._checked_shape()
        limit = self._timeout
        assert limit is not None
        self._timeout = max(limit, _START_LIMIT)
        try:
            super().setup_environment()
        finally:
            self._timeout = limit
        self._connect(shape)
        self._place(self.transport)

    def _connect(self, shape: MeshShape) -> None:
        """Groups of ranks for this layout, unless they are there already."""
        if self.mesh is None or not self.mesh.serves(shape):
            self.mesh = ProcessMesh(shape, there(self._timeout))
        rank_zero_info(
            f"expert parallel over {shape.world} ranks: ep={shape.ep} (ranks that share out the experts), "
            f"ep_dp={shape.ep_dp} (replicas of each expert)"
        )
        self.ends = JointEnds(self.mesh.world, self.root_device)

    def _connect_late_layers(self) -> None:
        """`auto` may want another layout once `configure_model` has built layers.

        Raises:
            ValueError: if layers were shared out before, in the layout without these.
        """
        mesh, shape = there(self.mesh), self._checked_shape()
        if shape == mesh.shape:
            return
        layers = moe_layers(self._module)
        if any(len(layer.experts.expert_ids) < layer.config.num_experts for layer in layers):
            raise ValueError(
                f"strategy.expert_parallel=auto shared out layers over {mesh.shape.ep} ranks, and with those that "
                f"configure_model has built it is {shape.ep}; set strategy.expert_parallel={shape.ep}"
            )
        self._connect(shape)

    def _checked_shape(self) -> MeshShape:
        shape = resolve_expert_parallel(
            self.expert_parallel,
            num_experts=[layer.config.num_experts for layer in moe_layers(self._module)],
            world=self.world_size,
            ranks_per_node=self.num_processes,
        )
        self.transport.check_ranks(shape.ep, requested=self.expert_parallel)
        return shape

    def _place(self, transport: Transport, device: torch.device | None = None) -> None:
        mesh = there(self.mesh)
        place(
            self._module,
            mesh,
            lambda layer: transport.build(mesh.ep, layer.config, self._larger),
            device=device,
        )

    # ---- module and optimizers -------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Give every rank its part of the module, equal replicas, and the optimizers their part of the state."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._connect_late_layers()
        mesh, module = there(self.mesh), self._module
        transport = sized_for_data(self.transport, trainer)
        if mesh.shape.world > 1:
            refuse_different(gather_objects(self._options_of_layers(transport)))
            self.precision_plugin = clipping_over_ranks(self.precision_plugin, self.clip_grad_norm)
        refuse_mixed_float16(self.precision_plugin, mesh.shape.world)
        # What `configure_model` built after `setup_environment`.
        self._place(transport, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.layout = ParamLayout(module, mesh, split=self.distributed_optimizer)
        sync_replicas(module, self.layout)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            refuse_lbfgs(self.optimizers, mesh.shape.ep)
            self._share_out_state(self.layout)
        self.setup_precision_plugin()
        settle_backends(module, self.precision_plugin)
        if fitting:
            # After the precision plugin, which sets them anew.
            self._lightning_optimizers = wrap_optimizers(self.optimizers, self, self.reducer)
            _optimizers_to_device(self.optimizers, self.root_device)
        self.checkpoints = Checkpoints(module, self.optimizers, self.layout, self.sharded)

    def _options_of_layers(self, transport: Transport) -> dict[str, object]:
        return {
            "strategy.dispatcher": type(transport).__name__,
            "strategy": transport,
            "strategy.distributed_optimizer": self.distributed_optimizer,
            "strategy.bucket_mb": self.bucket_mb,
            **layer_options(self._module, self.precision_plugin),
        }

    def _share_out_state(self, layout: ParamLayout) -> None:
        """Optimizer state to its owners, and the hooks that reduce gradients.

        A single rank needs neither, unless masters are to outlive weights.
        """
        self._remove_hooks()
        self.sharded = None
        stores = stores_of_released(
            self._module, layout, distributed_optimizer=self.distributed_optimizer
        )
        if stores:
            refuse_averaging(self._trainer.callbacks)
        if layout.mesh.shape.world > 1 or stores:
            refuse_foreign_parameters(self.optimizers, layout)
            if self.distributed_optimizer:
                self.sharded = ShardedState(self.optimizers, layout, stores)
            size = int(self.bucket_mb * 2**20)
            self.reducer = GradientReducer(layout, self._targets, bucket_bytes=size)
        self.released = ReleasedWeights(stores, self.sharded)
        self.norm = GradientNorm(layout, self._targets, self.root_device)

    @property
    def _targets(self) -> dict[str, nn.Parameter]:
        """Parameters of optimizers that aren't the module's own, by name."""
        return self.sharded.targets if self.sharded is not None else {}

    def _remove_hooks(self) -> None:
        if self.reducer is not None:
            self.reducer.detach()
        self.reducer = None

    @override
    def teardown(self) -> None:
        """Leave the module spread over the ranks, without hooks; a checkpoint may still be saved."""
        self._remove_hooks()
        if self.failing is None or self.released.can_restore_alone():
            # They go where the module goes now: all at once might not fit beside masters and moments.
            self.released.restore(torch.device("cpu"))
        super().teardown()

    # ---- gradients -------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """No reduction for all but the last micro-batch of a step."""
        if self.reducer is None:
            yield
            return
        self.reducer.enabled = False
        try:
            yield
        finally:
            self.reducer.enabled = True

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        """The tokens of the step are known now: gradients are divided by them while they are reduced."""
        if self.reducer is not None and self.reducer.enabled:
            module = self._module
            self.reducer.scale = divide_ahead(module) if module.automatic_optimization else None

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Finish the reduction that backward has begun."""
        if self.reducer is not None and self.reducer.enabled:
            self.reducer.finish()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **options: Any,
    ) -> object:
        """Refuse micro-batches that were too large once gradients are there; stop after the step if ranks agreed to."""

        def checked() -> object:
            result = closure()
            after_closure.enter_context(named_range("step"))
            if self.transport.fixed_shapes:
                self._larger.refuse(there(self.mesh).world, self.root_device)
            return result

        with ExitStack() as after_closure:
            result = super().optimizer_step(optimizer, checked, model, **options)
        self._stop_if_agreed()
        return result

    # ---- training --------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        """Check what ranks must agree on, take over signals to stop, and drop weights that only masters keep."""
        super().on_train_start()
        trainer, ends = self._trainer, there(self.ends)
        refuse_single_files(self.checkpoint_io)
        if there(self.mesh).shape.world > 1:
            refuse_different(gather_objects(step_options(trainer)))
        ends.refuse_uneven(trainer.num_training_batches, "train")
        ends.stop.install(stop_signals(self.cluster_environment))
        # Whatever loads weights has done so by now.
        self.released.release()

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Before the last micro-batch of a step, ask whether any rank was told to stop; then all do after the step."""
        super().on_train_batch_start(batch, batch_idx)
        trainer, ends = self._trainer, there(self.ends)
        if batch_idx == 0:
            ends.refuse_uneven(trainer.num_training_batches, "train")
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self._stop_if_agreed()  # in manual optimization a batch may have no step
            ends.ask_to_stop()
        there(self.checkpoints).restore_random_numbers()

    def _stop_if_agreed(self) -> None:
        if there(self.ends).agreed_to_stop():
            # Lightning raises SIGTERMException on all ranks once the batch is done.
            self._trainer._signal_connector.received_sigterm = True
