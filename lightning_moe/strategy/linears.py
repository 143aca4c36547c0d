"""Which linear layers of a module compute in eight bits, and the swap there and back."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_moe.nn import MLP, Attention
from lightning_moe.ops.dtypes import matmul_dtype
from lightning_moe.precision import LinearRecipe


@dataclass(frozen=True, slots=True)
class _Swap:
    parent: nn.Module
    name: str
    plain: nn.Linear
    converted: nn.Linear


class LinearSwap:
    """Linear layers of attention and of dense feed-forward networks, in eight bits for a while.

    Those are the `nn.Linear` children of `lightning_moe.nn.Attention` and `lightning_moe.nn.MLP`, which makes dense
    layers and shared experts. A layer whose weight another module holds as well stays as it is; so do routers, latent
    projections, embeddings and heads.

    Args:
        recipe: how they compute meanwhile.
    """

    def __init__(self, recipe: LinearRecipe) -> None:
        self.recipe = recipe
        self._swaps: list[_Swap] = []

    def swap(self, module: nn.Module) -> None:
        """Convert all such layers, or none if it raises.

        Raises:
            ValueError: if there is none, or the widths of one don't fit.
        """
        self.restore()
        found = linears_to_convert(module)
        asked = f"MoEPrecision linears={self.recipe.name}"
        if not found:
            raise ValueError(
                f"{asked} has no effect: the module has no linear layer with a weight of its own in "
                "lightning_moe.nn.Attention or lightning_moe.nn.MLP; leave linears out"
            )
        for path, linear in found.items():
            if reason := self.recipe.width_refusal(linear):
                raise ValueError(
                    f"{asked} can't convert {path}: {reason}; choose such widths (model.d_model, model.attention, "
                    "hidden sizes of dense layers and shared experts), or leave linears out"
                )
        for path, linear in found.items():
            parent_path, _, name = path.rpartition(".")
            parent = module.get_submodule(parent_path)
            swap = _Swap(parent, name, linear, self.recipe.convert(linear))
            setattr(parent, name, swap.converted)
            self._swaps.append(swap)

    def settle(self) -> str:
        """Check types and devices, which are final by now; gives a sentence for a log.

        Raises:
            ValueError: if a layer can't run.
        """
        for swap in self._swaps:
            weight = swap.converted.weight
            if reason := self.recipe.refusal(matmul_dtype(weight), weight.device):
                raise ValueError(
                    f"MoEPrecision linears={self.recipe.name} can't work here: {reason}; or leave linears out"
                )
        emulated = " (emulated by matmuls of the codes' values)" if self.recipe.emulate else ""
        return (
            f"linear layers: {len(self._swaps)} of attention and dense feed-forward networks compute in "
            f"{self.recipe.name}{emulated}"
        )

    def restore(self) -> None:
        """Put back the layers that were swapped out."""
        for swap in self._swaps:
            swap.plain.training = swap.converted.training
            setattr(swap.parent, swap.name, swap.plain)
        self._swaps = []


def linears_to_convert(module: nn.Module) -> dict[str, nn.Linear]:
    """The layers that `LinearSwap` is about, by their names in `module`."""
    holders: Counter[Tensor] = Counter(
        parameter for part in module.modules() for parameter in part.parameters(recurse=False)
    )
    return {
        f"{path}.{name}".removeprefix("."): child
        for path, part in module.named_modules()
        if isinstance(part, Attention | MLP)
        for name, child in part.named_children()
        # Not a subclass: that computes something else.
        if type(child) is nn.Linear and holders[child.weight] == 1
    }
