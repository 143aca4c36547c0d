"""Expert weights that exist in eight bits only while fit runs (`model.moe.fp8.fp8_only`)."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.parallel.layout import ParamLayout
from lightning_moe.precision import ReleasedParameter, WeightStore
from lightning_moe.strategy.checkpointing import FolderCheckpoints
from lightning_moe.strategy.expert_backends import experts_of

_ADVICE = "or set model.moe.fp8.fp8_only=false (fp8_only=False of MoEPrecision, if that asked)"


class ReleasedWeights(FolderCheckpoints):
    """Weights in eight bits only, for the strategy that owns the attribute below.

    Weights are dropped when all that loads them is done, right before the first batch, and come back when fit ends.
    In between, checkpoints get them from the masters.
    """

    distributed_optimizer: bool

    def stores_of_released(self, layout: ParamLayout) -> dict[str, WeightStore]:
        """By name, the weights that are to be dropped, and what will compute with their codes.

        Raises:
            ValueError: if there is no master to keep instead, or a callback that needs the weights.
        """
        assert self.lightning_module is not None
        names = layout.name_of()
        stores = {
            names[experts.get_parameter(name)]: store
            for experts in experts_of(self.lightning_module)
            for name, store in experts.backend.only_stores().items()
        }
        if stores:
            self._refuse_without_masters(layout, [layout.parameters[name] for name in stores])
            self._refuse_averaging(self.lightning_module.trainer)
        return stores

    def _refuse_without_masters(self, layout: ParamLayout, weights: list[nn.Parameter]) -> None:
        if not self.distributed_optimizer:
            raise ValueError(
                "model.moe.fp8.fp8_only=True keeps masters in the sharded optimizer, which "
                f"strategy.distributed_optimizer=False switches off; leave that at True, {_ADVICE}"
            )
        narrow = [w.dtype for w in weights if w.dtype != at_least_float32(w.dtype)]
        if narrow and layout.mesh.shape.world == 1:
            raise ValueError(
                f"model.moe.fp8.fp8_only=True keeps masters, and on one rank a weight in {narrow[0]} "
                f"(trainer.precision) has none beside itself; use bf16-mixed, {_ADVICE}"
            )

    @staticmethod
    def _refuse_averaging(trainer: Any) -> None:  # noqa: ANN401 - the Trainer sets its callbacks dynamically
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                raise ValueError(
                    f"{type(callback).__name__} averages weights that model.moe.fp8.fp8_only=True doesn't keep; leave "
                    f"the callback out, {_ADVICE}"
                )

    def on_train_start(self) -> None:
        """Whatever loads weights has done so by now."""
        super().on_train_start()
        if self.sharded is not None:
            self.sharded.release()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Local weights by name; released ones come from their masters, to the CPU, and then all ranks must call it."""
        sharded = self.sharded
        if sharded is None or not sharded.released:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        names = sharded.layout.name_of()
        state = self.lightning_module.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, ReleasedParameter):
                state[name] = sharded.gathered(names[value]).cpu()
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Into weights that are back for as long as that takes."""
        sharded = self.sharded
        released = sharded.released if sharded is not None else []
        if sharded is not None:
            sharded.restore()
        super().load_model_state_dict(checkpoint, strict)
        if sharded is not None and released:
            sharded.release()

    def teardown(self) -> None:
        """Bring the weights back; a rank that fails alone can only if it holds whole masters.

        They go where the module goes now: all at once might not fit beside masters and moments.
        """
        sharded = self.sharded
        if sharded is not None and (self.failing is None or sharded.layout.mesh.ep_dp.size == 1):
            sharded.restore(torch.device("cpu"))
        super().teardown()


def refuse_released(module: nn.Module) -> None:
    """Check that nothing asks for weights in eight bits only, which needs `ExpertParallelStrategy`.

    Raises:
        ValueError: if something does.
    """
    if any(experts.backend.only_stores() for experts in experts_of(module)):
        raise ValueError(
            f"model.moe.fp8.fp8_only=True needs strategy=ExpertParallelStrategy, also on one rank; use it, {_ADVICE}"
        )
