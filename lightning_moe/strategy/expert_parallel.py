"""Expert parallelism for the Lightning Trainer: hooks that call `parallel` and `optim` at the right moments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal, cast

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.nn import moe_layers
from lightning_moe.ops.capacity import Overflow
from lightning_moe.optim.sharded import ShardedState, refuse_foreign_parameters
from lightning_moe.parallel.apply import apply_expert_parallel
from lightning_moe.parallel.clip import clip_, global_norm
from lightning_moe.parallel.collectives import ProcessMesh, gather_objects
from lightning_moe.parallel.layout import ParamLayout
from lightning_moe.parallel.mesh import (
    MeshShape,
    check_expert_parallel,
    resolve_expert_parallel,
)
from lightning_moe.parallel.reducer import GradientReducer
from lightning_moe.parallel.replicas import materialize, sync_replicas
from lightning_moe.parallel.transports import LargerBatches, Transport, make_transport
from lightning_moe.step.window import close_window, divide_ahead
from lightning_moe.strategy.agreement import StopRequest, layer_options, refuse_different
from lightning_moe.strategy.expert_backends import settle_backends
from lightning_moe.strategy.joint_stages import JointStages
from lightning_moe.strategy.launchers import ProcessLauncher, ScriptLauncher
from lightning_moe.strategy.options import (
    check_options,
    refuse_lbfgs,
    refuse_mixed_float16,
    sized_for_data,
)
from lightning_moe.strategy.plain import restore_rng
from lightning_moe.strategy.released_weights import ReleasedWeights

# Until all ranks have met: they import, compile or wait for a slow disk for longer than a collective may last.
_START_LIMIT: Final = timedelta(minutes=5)


class ExpertParallelStrategy(ReleasedWeights, JointStages):
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
        self.mesh: ProcessMesh | None = None
        self.layout: ParamLayout | None = None
        self.sharded: ShardedState | None = None
        self.reducer: GradientReducer | None = None
        self._rng_to_restore: dict[str, Any] | None = None
        self._larger = LargerBatches()
        self._stop = StopRequest()
        self._predict_batches: list[tuple[int, int]] = []

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = ProcessLauncher(self, start_method=self._start_method)

    # ---- ranks -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Check sizes, connect the ranks, spread the experts of layers that exist already."""
        shape = self._shape()
        self.transport.check_ranks(shape.ep, requested=self.expert_parallel)
        limit = self._timeout
        assert limit is not None
        self._timeout = max(limit, _START_LIMIT)
        try:
            super().setup_environment()
        finally:
            self._timeout = limit
        if self.mesh is None or not self.mesh.serves(shape):
            self.mesh = ProcessMesh(shape, limit)
        rank_zero_info(
            f"expert parallel over {shape.world} ranks: ep={shape.ep} (ranks that share out the experts), "
            f"ep_dp={shape.ep_dp} (replicas of each expert)"
        )
        self._spread_experts(self.transport)

    def _shape(self) -> MeshShape:
        assert self.lightning_module is not None
        layers = moe_layers(self.lightning_module)
        return resolve_expert_parallel(
            self.expert_parallel,
            num_experts=[layer.config.num_experts for layer in layers],
            world=self.world_size,
            ranks_per_node=self.num_processes,
        )

    def _spread_experts(self, transport: Transport) -> None:
        mesh = self._connected()
        assert self.lightning_module is not None

        apply_expert_parallel(
            self.lightning_module,
            mesh.shape,
            mesh.rank,
            lambda layer: transport.build(mesh.ep, layer.config, self._larger),
        )

    def _connected(self) -> ProcessMesh:
        if self.mesh is None:
            raise RuntimeError(
                "the strategy's mesh exists once the Trainer has called setup_environment"
            )
        return self.mesh

    # ---- model and optimizers --------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer) -> None:
        """Give every rank its part of the module, equal replicas, and the optimizers their part of the state."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        mesh, module = self._connected(), self.lightning_module
        transport = sized_for_data(self.transport, trainer)
        if mesh.shape.world > 1:
            refuse_different(gather_objects(self._options_of_layers(module, transport)))
        refuse_mixed_float16(self.precision_plugin, self.world_size)
        # Layers that `configure_model` built after `setup_environment`.
        for layer in moe_layers(module):
            mesh.shape.experts_of(mesh.rank, layer.config.num_experts)
        self._spread_experts(transport)
        materialize(module, self.root_device, mesh.world)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.layout = ParamLayout(module, mesh, split=self.distributed_optimizer)
        sync_replicas(module, self.layout)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            refuse_lbfgs(self.optimizers, mesh.shape.ep)
            self._share_out(self.layout)
        self.setup_precision_plugin()
        settle_backends(module, self.precision_plugin)
        if fitting:
            self._follow_optimizers()
            _optimizers_to_device(self.optimizers, self.root_device)

    def _options_of_layers(self, module: nn.Module, transport: Transport) -> dict[str, object]:
        return {
            "strategy.dispatcher": type(transport).__name__,
            "strategy": transport,
            "strategy.distributed_optimizer": self.distributed_optimizer,
            "strategy.bucket_mb": self.bucket_mb,
            **layer_options(module, self.precision_plugin),
        }

    def _share_out(self, layout: ParamLayout) -> None:
        """Optimizer state to its owners, and the hooks that reduce gradients.

        A single rank needs neither, unless masters are to outlive weights.
        """
        self._remove_hooks()
        self.sharded = None
        stores = self.stores_of_released(layout)
        if layout.mesh.shape.world == 1 and not stores:
            return
        refuse_foreign_parameters(self.optimizers, layout)
        if self.distributed_optimizer:
            self.sharded = ShardedState(self.optimizers, layout, stores)
        targets = self.sharded.targets if self.sharded is not None else {}
        self.reducer = GradientReducer(layout, targets, bucket_bytes=int(self.bucket_mb * 2**20))

    def _follow_optimizers(self) -> None:
        """After the precision plugin is connected: that wraps the optimizers anew."""
        # Manual optimisation calls Lightning's wrappers; each imitates the class of its optimizer.
        wrapped = cast("list[Optimizer]", self._lightning_optimizers)
        if self.reducer is not None:
            for optimizer in (*self.optimizers, *wrapped):
                self.reducer.follow(optimizer)

    def _remove_hooks(self) -> None:
        if self.reducer is not None:
            self.reducer.detach()
        self.reducer = None

    def setup_precision_plugin(self) -> None:
        """Clipping by norm must see all ranks, also where a user's module calls the plugin directly."""
        super().setup_precision_plugin()
        if self.world_size > 1:
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]  # of this plugin alone

    # ---- gradients -------------------------------------------------------------------------------------------

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

    def pre_backward(self, closure_loss: Tensor) -> None:
        """The tokens of the step are known now: gradients are divided by them while they are reduced."""
        module = self.lightning_module
        if self.reducer is not None and self.reducer.enabled and module is not None:
            self.reducer.scale = divide_ahead(module) if module.automatic_optimization else None

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finish the reduction that backward has begun."""
        if self.reducer is not None and self.reducer.enabled:
            self.reducer.finish()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **options: Any,
    ) -> object:
        """Once gradients are there, refuse micro-batches that were too large, then close the step's window."""

        def closed() -> object:
            result = closure()
            assert self.lightning_module is not None
            if self.transport.fixed_shapes:
                self._larger.refuse(self._connected().world, self.root_device)
            close_window(self.lightning_module)
            return result

        return super().optimizer_step(optimizer, closed, model, **options)

    def reduce(
        self,
        tensor: Tensor,
        group: object = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> Tensor:
        """As in `DDPStrategy`, and noted in the ledger."""
        if self.mesh is not None and self.mesh.world.size > 1:
            self.mesh.ledger.enter("all_reduce", "world", tensor)
        return super().reduce(tensor, group, reduce_op)

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of `optimizer` over all ranks, each element once; equal everywhere."""
        shares = self._shares()
        gradients = [(p.grad, shares[p]) for p in _parameters(optimizer) if p.grad is not None]
        return global_norm(
            gradients, self._connected().world, norm_type=norm_type, device=self.root_device
        )

    def clip_grad_norm(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip by the norm over all ranks; gives the norm before."""
        norm = self.gradient_norm(optimizer, norm_type)
        clip_([p.grad for p in _parameters(optimizer) if p.grad is not None], norm, max_norm)
        return norm

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.clip_grad_norm(optimizer, clip_val)

    def _shares(self) -> dict[Tensor, float]:
        assert self.layout is not None
        targets = self.sharded.targets if self.sharded is not None else {}
        return {
            targets.get(name, self.layout.parameters[name]): spec.norm_share
            for name, spec in self.layout.specs.items()
        }

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """A resumed run goes on with each rank's own random numbers, from its first batch on."""
        super().on_train_batch_start(batch, batch_idx)
        if self._rng_to_restore is not None:
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None

    def teardown(self) -> None:
        """Leave the module spread over the ranks, without hooks; a checkpoint may still be saved."""
        self._remove_hooks()
        super().teardown()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
