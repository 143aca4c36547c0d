"""Parts: the tensors of one rank, as blocks of the global ones that a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_moe.parallel.layout import ParamLayout, plain_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A local tensor as a block of a global one; speaks torch's protocol for objects in a checkpoint.

    Attributes:
        tensor: contiguous local values; loading overwrites them.
        whole: global shape.
        offsets: where the block starts.
    """

    tensor: Tensor
    whole: tuple[int, ...]
    offsets: tuple[int, ...]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())

    def __create_write_items__(self, fqn: str, part: object) -> list[WriteItem]:
        """What to write: torch drops blocks that another rank writes as well."""
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=torch.Size(self.whole),
        )
        index = MetadataIndex(fqn, torch.Size(self.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read."""
        return [self._chunk()]


class Parts:
    """Which part of every global tensor is this rank's.

    Args:
        layout: the parameters; a tensor is treated as the parameter of its name, whatever holds it.
        aliases: name in `layout` of parameters that go by several names.

    Attributes:
        specs: by name, aliases included.
    """

    def __init__(self, layout: ParamLayout, aliases: Mapping[str, str] | None = None) -> None:
        self._mesh = layout.mesh
        names = {name: name for name in layout.specs} | dict(aliases or {})
        self.specs = {name: layout.specs[known] for name, known in names.items()}

    @classmethod
    def of_module(cls, module: nn.Module, layout: ParamLayout) -> "Parts":
        """Those of a module's tensors, under all names that it has for them."""
        known = layout.name_of()
        named = module.named_parameters(remove_duplicate=False)
        return cls(layout, {plain_name(name): known[parameter] for name, parameter in named})

    def weight(self, name: str, tensor: Tensor) -> Part:
        """A tensor shaped like a local parameter or buffer."""
        offsets = [0] * tensor.dim()
        size = list(tensor.shape)
        spec = self.specs.get(name)
        if spec is not None and spec.num_shards > 1:
            offsets[0] = spec.shard_index * size[0]
            size[0] *= spec.num_shards
        return Part(tensor=tensor.detach().contiguous(), whole=tuple(size), offsets=tuple(offsets))

    def moment(self, name: str, tensor: Tensor) -> Part:
        """A tensor of the optimizer, shaped like this rank's part of a parameter; or a scalar."""
        flat = tensor.detach().reshape(-1) if tensor.dim() else tensor.detach()
        if not tensor.dim():
            return Part(tensor=flat, whole=(), offsets=())
        spec = self.specs[name]
        if flat.numel() != spec.chunk:
            raise ValueError(
                f"the optimizer keeps a tensor of {flat.numel()} elements for {name}, whose part here has "
                f"{spec.chunk}; only elementwise optimizers can be saved with experts on several ranks"
            )
        return Part(tensor=flat, whole=(spec.global_numel,), offsets=(spec.global_start,))

    def local_weight(self, saved: TensorStorageMetadata, num_experts: int | None) -> Part:
        """An empty tensor for what this rank needs of a saved one; `num_experts` if dimension 0 counts experts."""
        size, offsets = list(saved.size), [0] * len(saved.size)
        if num_experts is not None:
            experts = self._mesh.shape.experts_of(self._mesh.rank, num_experts)
            size[0], offsets[0] = len(experts), experts.start
        return Part(tensor=_empty(size, saved), whole=tuple(saved.size), offsets=tuple(offsets))

    def local_moment(self, name: str, saved: TensorStorageMetadata) -> Part | None:
        """The same for a tensor of the optimizer; None for a parameter that this model doesn't have."""
        if not saved.size:
            return Part(tensor=_empty([], saved), whole=(), offsets=())
        spec = self.specs.get(name)
        if spec is None or saved.size[0] != spec.global_numel:
            return None
        return Part(
            tensor=_empty([spec.chunk], saved),
            whole=tuple(saved.size),
            offsets=(spec.global_start,),
        )

    def slice_weight(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole weight, as a single process saves it."""
        spec = self.specs.get(name)
        if spec is None or spec.num_shards == 1 or whole.shape[0] != spec.global_shape[0]:
            return whole
        start = spec.shard_index * spec.shape[0]
        return whole[start : start + spec.shape[0]].clone()

    def slice_moment(self, name: str, whole: Tensor) -> Tensor:
        """This rank's flat part of a whole moment."""
        spec = self.specs[name]
        if whole.numel() != spec.global_numel:
            return whole
        return whole.reshape(-1)[spec.global_start : spec.global_start + spec.chunk].clone()

    def expert_counts(self) -> dict[str, int]:
        """Number of experts of every parameter whose dimension 0 counts them."""
        return {
            name: spec.global_shape[0] for name, spec in self.specs.items() if spec.kind == "expert"
        }


def _empty(size: list[int], saved: TensorStorageMetadata) -> Tensor:
    return torch.empty(size, dtype=saved.properties.dtype)
