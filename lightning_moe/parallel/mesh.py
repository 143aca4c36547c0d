"""Arithmetic of rank layouts: which ranks share what. No communication, so it is tested without ranks.

Two views of the same ranks. Dense view (pp, dp, cp, tp): parameters outside of experts are replicated over dp and
cp. MoE view (pp, ep_dp, ep): experts are spread over ep and replicated over ep_dp. The views are folded,
dp * cp * tp = ep_dp * ep, and ep is innermost: neighbouring ranks, which a node's fast links join.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Axis = Literal["world", "stage", "pp", "dp", "cp", "tp", "ep_dp", "ep"]

DENSE_VIEW: Final = ("pp", "dp", "cp", "tp")
MOE_VIEW: Final = ("pp", "ep_dp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of all axes for `world` ranks. `dp` and `ep_dp` follow from the others.

    Raises:
        ValueError: if the sizes don't divide the ranks.

    Source: Olmo-core 3 report, meshes; parallel folding: arXiv:2504.14960.
    """

    world: int
    ep: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Check that every axis fits."""
        for name in ("world", "ep", "pp", "cp", "tp"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"the size of axis {name} must be a positive integer, got {size!r}"
                )
        if self.world % (self.pp * self.cp * self.tp):
            raise ValueError(
                f"{self.world} ranks can't be split into pp={self.pp} x cp={self.cp} x tp={self.tp}; "
                "their product must divide the number of ranks"
            )
        pool = self.world // self.pp
        if pool % self.ep:
            raise ValueError(
                f"strategy.expert_parallel={self.ep} does not divide the {pool} ranks "
                f"({self.world} ranks, pp={self.pp}); choose one of {_listed(divisors(pool))}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense view."""
        return self.world // (self.pp * self.cp * self.tp)

    @property
    def ep_dp(self) -> int:
        """Replicas of every expert."""
        return self.world // (self.pp * self.ep)

    def coordinates(self, rank: int, view: Sequence[str]) -> dict[str, int]:
        """Index of `rank` along each axis of `DENSE_VIEW` or `MOE_VIEW`."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world} ranks")
        found: dict[str, int] = {}
        for axis in reversed(view):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in view}

    def ranks_along(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axis`, in the axis' order.

        `world` is all axes together, `stage` all but pp: the ranks that hold the same layers. Collectives along `ep`
        exchange tokens, along `ep_dp` reduce gradients of experts, along `stage` all other gradients.
        """
        key = self._group_key(axis)
        own = key(rank)
        return tuple(other for other in range(self.world) if key(other) == own)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, each rank in exactly one, in the order of their first ranks."""
        key = self._group_key(axis)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            members.setdefault(key(rank), []).append(rank)
        return tuple(map(tuple, members.values()))

    def _group_key(self, axis: Axis) -> Callable[[int], tuple[int, ...]]:
        """What all ranks of one group along `axis` share: their places along the view's other axes."""
        view = MOE_VIEW if axis in ("ep_dp", "ep") else DENSE_VIEW
        free = {"world": DENSE_VIEW, "stage": DENSE_VIEW[1:]}.get(axis, (axis,))

        def key(rank: int) -> tuple[int, ...]:
            own = self.coordinates(rank, view)
            return tuple(index for name, index in own.items() if name not in free)

        return key

    def experts_of(self, rank: int, num_experts: int) -> range:
        """Global ids of the experts that live on `rank`.

        Raises:
            ValueError: if they can't be spread evenly.
        """
        check_experts(num_experts, self.ep)
        per_rank = num_experts // self.ep
        first = self.coordinates(rank, MOE_VIEW)["ep"] * per_rank
        return range(first, first + per_rank)


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def check_experts(num_experts: int, ep: int) -> None:
    """Check that experts can be spread evenly.

    Raises:
        ValueError: if `ep` doesn't divide `num_experts`.
    """
    if num_experts % ep:
        raise ValueError(
            f"model.moe.num_experts={num_experts} is not a multiple of strategy.expert_parallel={ep}; choose "
            f"strategy.expert_parallel from {_listed(divisors(num_experts))}, or another number of experts"
        )


def check_expert_parallel(requested: object) -> None:
    """Check a request as far as that is possible before ranks and experts are known.

    Raises:
        ValueError: if it is neither a positive integer nor `auto`.
    """
    if requested != "auto" and (type(requested) is not int or requested < 1):
        raise ValueError(
            f'strategy.expert_parallel={requested!r} must be a positive integer or "auto"'
        )


def resolve_expert_parallel(
    requested: int | Literal["auto"],
    *,
    num_experts: Sequence[int],
    world: int,
    ranks_per_node: int,
) -> MeshShape:
    """The mesh for a request, checked against every MoE layer's number of experts (in `num_experts`).

    `auto` is the greatest size that divides the experts of all layers and the ranks of a node, so that tokens stay
    inside a node; 1 for a model without experts.

    Raises:
        ValueError: if ranks or experts can't be divided so; names both numbers and the sizes allowed.
    """
    check_expert_parallel(requested)
    if requested == "auto":
        requested = math.gcd(ranks_per_node, world, *num_experts) if num_experts else 1
    for experts in num_experts:
        check_experts(experts, requested)
    return MeshShape(world=world, ep=requested)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
