"""Which rank holds which part of each parameter; reducer, clipping, optimizer and checkpoints read it."""

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor, nn

from lightning_moe.nn import Experts
from lightning_moe.parallel.collectives import AxisGroup, ProcessMesh

# Splitting less than this saves little and costs a collective's latency. Source: Olmo-core 3.
MIN_SPLIT_NUMEL: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One parameter, as this rank sees it.

    Attributes:
        name: its name, the same on all ranks and free of wrappers' prefixes.
        kind: `expert` for weights of routed experts, else `non_expert`.
        shape: of the local tensor.
        num_shards, shard_index: over the ranks that hold other experts, along dimension 0.
        num_replicas, replica_index: over the ranks that hold the same tensor.
        split: whether the optimizer splits it over its replicas.
    """

    name: str
    kind: Literal["non_expert", "expert"]
    shape: tuple[int, ...]
    num_shards: int
    shard_index: int
    num_replicas: int
    replica_index: int
    split: bool

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def chunk(self) -> int:
        """Elements that this rank's optimizer updates."""
        return self.numel // self.num_replicas if self.split else self.numel

    @property
    def chunk_start(self) -> int:
        """Where they start in the flat local tensor."""
        return self.replica_index * self.chunk if self.split else 0

    @property
    def global_start(self) -> int:
        """Where they start in the flat tensor over all experts."""
        return self.shard_index * self.numel + self.chunk_start

    def part_of(self, tensor: Tensor) -> Tensor:
        """The flat part of a local tensor that this rank's optimizer updates; a view."""
        return tensor.detach().view(-1)[self.chunk_start : self.chunk_start + self.chunk]

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape over all experts."""
        return (
            (self.shape[0] * self.num_shards, *self.shape[1:])
            if self.num_shards > 1
            else self.shape
        )

    @property
    def global_numel(self) -> int:
        """Elements over all experts."""
        return self.numel * self.num_shards

    @property
    def norm_share(self) -> float:
        """Factor on a sum over the optimizer's part, so that a sum over all ranks counts each element once."""
        return 1.0 if self.split else 1.0 / self.num_replicas


class ParamLayout:
    """The `ParamSpec` of every parameter of a module, in the module's order.

    Args:
        module: with its experts already spread.
        mesh: the ranks.
        split: whether the optimizer splits large parameters over their replicas.
    """

    def __init__(self, module: nn.Module, mesh: ProcessMesh, *, split: bool) -> None:
        self.mesh = mesh
        self.parameters: dict[str, nn.Parameter] = {}
        self.specs: dict[str, ParamSpec] = {}
        # By owner, not by a mark on the tensor, which deepcopy, casts and re-creation would lose.
        experts = {
            parameter
            for owner in module.modules()
            if isinstance(owner, Experts)
            for parameter in owner.parameters(recurse=False)
        }
        for wrapped_name, parameter in module.named_parameters():
            name = plain_name(wrapped_name)
            self.parameters[name] = parameter
            self.specs[name] = self._spec(
                name, parameter, "expert" if parameter in experts else "non_expert", split
            )

    def _spec(
        self, name: str, parameter: nn.Parameter, kind: Literal["non_expert", "expert"], split: bool
    ) -> ParamSpec:
        replicas = self.mesh.ep_dp if kind == "expert" else self.mesh.stage
        numel = parameter.numel()
        return ParamSpec(
            name=name,
            kind=kind,
            shape=tuple(parameter.shape),
            num_shards=self.mesh.ep.size if kind == "expert" else 1,
            shard_index=self.mesh.ep.index if kind == "expert" else 0,
            num_replicas=replicas.size,
            replica_index=replicas.index,
            split=split
            and replicas.size > 1
            and numel >= MIN_SPLIT_NUMEL
            and numel % replicas.size == 0
            and parameter.is_contiguous(),
        )

    def replicas(self, spec: ParamSpec) -> AxisGroup:
        """The ranks that hold the same tensor."""
        return self.mesh.ep_dp if spec.kind == "expert" else self.mesh.stage

    def name_of(self) -> dict[Tensor, str]:
        """Name of each parameter."""
        return {parameter: name for name, parameter in self.parameters.items()}


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers, such as torch.compile's."""
    return name.replace("_orig_mod.", "")
