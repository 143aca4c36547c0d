"""Expert parallelism for the Lightning Trainer: hooks that call `parallel` and `optim` at the right moments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_moe.nn import Dispatcher, MoE
from lightning_moe.optim.sharded import ShardedState
from lightning_moe.optim.step_window import close_window
from lightning_moe.parallel.apply import apply_expert_parallel
from lightning_moe.parallel.clip import clip_, global_norm
from lightning_moe.parallel.collectives import ProcessMesh
from lightning_moe.parallel.dispatch import AllToAllDispatcher
from lightning_moe.parallel.layout import ParamLayout
from lightning_moe.parallel.mesh import MeshShape, resolve_expert_parallel
from lightning_moe.parallel.reducer import GradientReducer
from lightning_moe.parallel.replicas import materialize, sync_replicas
from lightning_moe.strategy.checkpointing import FolderCheckpoints
from lightning_moe.strategy.plain import restore_rng


class ExpertParallelStrategy(FolderCheckpoints, DDPStrategy):
    """Experts stay on their ranks and tokens travel; everything else is data parallel with sharded optimizer state.

    Works for any LightningModule with `lightning_moe.nn.MoE` layers, and for one without. Weights, losses and
    gradients are those of one process with the whole batch.

    Args:
        expert_parallel: ranks that share out the experts of a layer; must divide the number of experts and of
            ranks. `auto`: as many as fit into one node.
        dispatcher: `all_to_all` (no token is dropped).
        receive_limit: rows that one rank may receive per layer and micro-batch under `all_to_all`; more is an error
            on all ranks. None: no limit; a rank may receive up to ranks * tokens * top_k rows.
        distributed_optimizer: split optimizer state over replicas (more than one rank only).
        bucket_mb: size of one gradient message (MiB).
        timeout: how long a collective may take before all ranks give up (seconds, or a timedelta).
        start_method: how Lightning starts processes: `popen`, `spawn`, `fork` or `forkserver`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend:
            as in `DDPStrategy`.

    Raises:
        ValueError: for sizes that don't fit, on every rank, before a process group exists or a weight is changed.
    """

    def __init__(
        self,
        expert_parallel: int | Literal["auto"] = "auto",
        *,
        dispatcher: Literal["all_to_all"] = "all_to_all",
        receive_limit: int | None = None,
        distributed_optimizer: bool = True,
        bucket_mb: float = 25.0,
        timeout: float | timedelta = 60.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **lightning_options: Any,  # noqa: ANN401 - DDPStrategy's own, checked below
    ) -> None:
        _check_options(lightning_options, dispatcher, bucket_mb, receive_limit)
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        super().__init__(timeout=limit, start_method=start_method, **lightning_options)
        self.expert_parallel = expert_parallel
        self.receive_limit = receive_limit
        self.distributed_optimizer = distributed_optimizer
        self.bucket_mb = bucket_mb
        self.mesh: ProcessMesh | None = None
        self.layout: ParamLayout | None = None
        self.sharded: ShardedState | None = None
        self.reducer: GradientReducer | None = None
        self._rng_to_restore: dict[str, Any] | None = None

    # ---- ranks -----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Check sizes, connect the ranks, spread the experts of layers that exist already."""
        shape = self._shape()
        super().setup_environment()
        if self.mesh is None or not self.mesh.serves(shape):
            assert self._timeout is not None
            self.mesh = ProcessMesh(shape, self._timeout)
        rank_zero_info(
            f"expert parallel: {shape.ep} ranks share the experts, {shape.ep_dp} replicas of each expert"
        )
        self._spread_experts()

    def _shape(self) -> MeshShape:
        assert self.lightning_module is not None
        layers = [layer for layer in self.lightning_module.modules() if isinstance(layer, MoE)]
        return resolve_expert_parallel(
            self.expert_parallel,
            num_experts=[layer.config.num_experts for layer in layers],
            world=self.world_size,
            ranks_per_node=self.num_processes,
        )

    def _spread_experts(self) -> None:
        mesh = self._connected()
        assert self.lightning_module is not None

        def dispatcher(layer: MoE) -> Dispatcher:
            return AllToAllDispatcher(mesh.ep, receive_limit=self.receive_limit)

        apply_expert_parallel(self.lightning_module, mesh.shape, mesh.rank, dispatcher)

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
        self._refuse_mixed_float16()
        # Layers that `configure_model` built after `setup_environment`.
        for layer in module.modules():
            if isinstance(layer, MoE):
                mesh.shape.experts_of(mesh.rank, layer.config.num_experts)
        self._spread_experts()
        materialize(module, self.root_device, mesh.dense)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.layout = ParamLayout(module, mesh, split=self.distributed_optimizer)
        sync_replicas(module, self.layout)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            self._refuse_lbfgs()
            self._share_out(self.layout)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _share_out(self, layout: ParamLayout) -> None:
        """Optimizer state to its owners, and the hooks that reduce gradients; neither on a single rank."""
        self._remove_hooks()
        self.sharded = None
        if layout.mesh.shape.world == 1:
            return
        if self.distributed_optimizer:
            self.sharded = ShardedState(self.optimizers, layout)
        targets = self.sharded.targets if self.sharded is not None else {}
        self.reducer = GradientReducer(layout, targets, bucket_bytes=int(self.bucket_mb * 2**20))

    def _remove_hooks(self) -> None:
        if self.reducer is not None:
            self.reducer.detach()
        self.reducer = None

    def _refuse_mixed_float16(self) -> None:
        plugin = self.precision_plugin
        if (
            self.world_size > 1
            and isinstance(plugin, MixedPrecision)
            and plugin.precision == "16-mixed"
        ):
            raise ValueError(
                "trainer.precision=16-mixed does not work with ExpertParallelStrategy on more than one rank: each "
                "rank would judge by its own gradients whether to skip a step; use bf16-mixed"
            )

    def _refuse_lbfgs(self) -> None:
        if self._connected().shape.ep > 1 and any(isinstance(o, LBFGS) for o in self.optimizers):
            raise ValueError(
                "LBFGS does not work with experts on several ranks: it needs inner products over all parameters; "
                "use an elementwise optimizer such as AdamW, or strategy.expert_parallel=1"
            )

    def setup_precision_plugin(self) -> None:
        """Clipping by norm must see all ranks, also where a user's module calls the plugin directly."""
        super().setup_precision_plugin()
        if self.world_size > 1:
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

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

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finish the reduction that backward has begun."""
        if self.reducer is not None and self.reducer.enabled:
            self.reducer.finish()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **options: Any,  # noqa: ANN401 - Lightning's signature
    ) -> Any:  # noqa: ANN401
        """Divide gradients by the step's tokens before any callback or clipping sees them (`optim.StepWindow`)."""

        def closed() -> Any:  # noqa: ANN401 - whatever Lightning's closure returns
            result = closure()
            assert self.lightning_module is not None
            close_window(self.lightning_module)
            return result

        return super().optimizer_step(optimizer, closed, model, **options)

    def gradient_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of `optimizer` over all ranks, each element once; equal everywhere."""
        gradients = [
            (p.grad, self._norm_share(p)) for p in _parameters(optimizer) if p.grad is not None
        ]
        return global_norm(
            gradients, self._connected().dense, norm_type=norm_type, device=self.root_device
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

    def _norm_share(self, parameter: Tensor) -> float:
        return self._shares()[parameter]

    def _shares(self) -> dict[Tensor, float]:
        assert self.layout is not None
        targets = self.sharded.targets if self.sharded is not None else {}
        return {
            targets.get(name, self.layout.parameters[name]): spec.norm_share
            for name, spec in self.layout.specs.items()
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """A resumed run goes on with each rank's own random numbers, from its first batch on."""
        if self._rng_to_restore is not None:
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None

    def teardown(self) -> None:
        """Leave the module spread over the ranks, without hooks; a checkpoint may still be saved."""
        self._remove_hooks()
        super().teardown()


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_LIGHTNING_OPTIONS = frozenset(
    {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
    }
)


def _check_options(
    lightning_options: dict[str, Any], dispatcher: str, bucket_mb: float, receive_limit: int | None
) -> None:
    if unknown := sorted(set(lightning_options) - _LIGHTNING_OPTIONS):
        raise TypeError(
            f"ExpertParallelStrategy has no option {unknown[0]!r}; DDP's own options have no effect here, since the "
            "module isn't wrapped in DistributedDataParallel"
        )
    if dispatcher != "all_to_all":
        raise ValueError(f"strategy.dispatcher={dispatcher!r} must be all_to_all")
    if bucket_mb <= 0:
        raise ValueError(f"strategy.bucket_mb={bucket_mb} must be above 0")
    if receive_limit is not None and receive_limit < 1:
        raise ValueError(
            f"strategy.receive_limit={receive_limit} must be at least 1, or null for no limit"
        )
