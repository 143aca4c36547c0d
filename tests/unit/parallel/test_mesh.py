"""Rank layouts as arithmetic: no process exists here."""

import pytest

from lightning_moe.parallel.mesh import (
    DENSE_VIEW,
    MOE_VIEW,
    MeshShape,
    divisors,
    resolve_expert_parallel,
)

AXES = ("world", "stage", "pp", "dp", "cp", "tp", "ep_dp", "ep")


def _all_layouts(world: int) -> list[MeshShape]:
    """Every (pp, cp, tp, ep) that divides `world` ranks."""
    return [
        MeshShape(world=world, pp=pp, cp=cp, tp=tp, ep=ep)
        for pp in divisors(world)
        for cp in divisors(world // pp)
        for tp in divisors(world // pp // cp)
        for ep in divisors(world // pp)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_every_rank_is_in_exactly_one_group_per_axis_of_every_layout(world: int) -> None:
    for shape in _all_layouts(world):
        for axis in AXES:
            groups = shape.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            for group in groups:
                assert shape.ranks_along(axis, group[-1]) == group


@pytest.mark.parametrize("world", range(1, 65))
def test_every_expert_layout_up_to_64_ranks_folds_and_groups_neighbours(world: int) -> None:
    for ep in divisors(world):
        shape = MeshShape(world=world, ep=ep)
        assert shape.dp * shape.cp * shape.tp == shape.ep_dp * shape.ep == world
        assert shape.groups("ep") == tuple(
            tuple(range(first, first + ep)) for first in range(0, world, ep)
        )
        assert shape.groups("ep_dp") == tuple(tuple(range(first, world, ep)) for first in range(ep))
        assert shape.groups("stage") == shape.groups("world") == (tuple(range(world)),)


@pytest.mark.parametrize("world", [1, 2, 4, 6, 12])
def test_coordinates_lead_back_to_their_rank_in_both_views(world: int) -> None:
    for shape in _all_layouts(world):
        assert shape.dp * shape.cp * shape.tp == shape.ep_dp * shape.ep
        for view in (DENSE_VIEW, MOE_VIEW):
            for rank in range(world):
                back = 0
                for axis, index in shape.coordinates(rank, view).items():
                    assert 0 <= index < getattr(shape, axis)
                    back = back * getattr(shape, axis) + index
                assert back == rank


@pytest.mark.parametrize("world", [1, 2, 4, 6, 12, 16, 64])
def test_the_experts_of_each_expert_group_are_all_experts_once_and_in_order(world: int) -> None:
    for ep in divisors(world):
        shape = MeshShape(world=world, ep=ep)
        for group in shape.groups("ep"):
            ids = [expert for rank in group for expert in shape.experts_of(rank, 3 * ep)]
            assert ids == list(range(3 * ep))
        for group in shape.groups("ep_dp"):
            assert len({shape.experts_of(rank, 3 * ep) for rank in group}) == 1


def test_expert_e_lives_on_rank_e_over_experts_per_rank() -> None:
    shape = MeshShape(world=8, ep=4)
    for rank in range(8):
        assert [e for e in range(12) if e // 3 == rank % 4] == list(shape.experts_of(rank, 12))


def test_eight_gpus_with_two_expert_ranks_form_pairs_and_every_second_rank() -> None:
    shape = MeshShape(world=8, ep=2)
    assert shape.groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("ep_dp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert shape.groups("dp") == shape.groups("stage") == (tuple(range(8)),)


def test_pipeline_stages_share_neither_tokens_nor_experts() -> None:
    shape = MeshShape(world=8, pp=2, cp=2, ep=2)
    assert shape.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups("cp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.groups("stage") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert shape.groups("world") == (tuple(range(8)),)
    assert shape.groups("ep_dp") == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_tensor_ranks_are_neighbours_in_one_stage() -> None:
    shape = MeshShape(world=8, cp=2, tp=2, ep=4)
    assert shape.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups("stage") == (tuple(range(8)),)
    assert shape.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_groups_of_512_ranks_are_those_known_by_hand() -> None:
    shape = MeshShape(world=512, pp=4, cp=2, ep=8)
    assert (shape.dp, shape.ep_dp) == (64, 16)
    assert shape.coordinates(300, DENSE_VIEW) == {"pp": 2, "dp": 22, "cp": 0, "tp": 0}
    assert shape.coordinates(300, MOE_VIEW) == {"pp": 2, "ep_dp": 5, "ep": 4}
    assert shape.ranks_along("ep", 300) == tuple(range(296, 304))
    assert shape.ranks_along("ep_dp", 300) == tuple(range(260, 384, 8))
    assert shape.ranks_along("pp", 300) == (44, 172, 300, 428)
    assert shape.ranks_along("stage", 300) == tuple(range(256, 384))
    assert len(shape.groups("ep")) == 64
    assert len(shape.groups("ep_dp")) == 32
    assert list(shape.experts_of(300, 64)) == list(range(32, 40))


@pytest.mark.parametrize(
    ("requested", "num_experts", "world", "message"),
    [
        (4, 6, 4, r"num_experts=6 is not a multiple of strategy.expert_parallel=4; .*1, 2, 3, 6"),
        (3, 4, 4, r"num_experts=4 is not a multiple of strategy.expert_parallel=3; .*1, 2, 4"),
        (3, 6, 4, r"expert_parallel=3 does not divide the 4 ranks .*choose one of 1, 2, 4"),
        (8, 4, 4, r"num_experts=4 is not a multiple of strategy.expert_parallel=8"),
        (8, 8, 4, r"strategy.expert_parallel=8 does not divide the 4 ranks .*1, 2, 4"),
        (4, 2, 4, r"num_experts=2 is not a multiple of strategy.expert_parallel=4; .*1, 2,"),
        (0, 4, 4, r'strategy.expert_parallel=0 must be a positive integer or "auto"'),
        (-1, 4, 4, r'strategy.expert_parallel=-1 must be a positive integer or "auto"'),
        (True, 4, 4, r'strategy.expert_parallel=True must be a positive integer or "auto"'),
        (2.0, 4, 4, r'strategy.expert_parallel=2.0 must be a positive integer or "auto"'),
        ("x", 4, 4, r"strategy.expert_parallel='x' must be a positive integer or \"auto\""),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_option_and_what_would_fit(
    requested: object, num_experts: int, world: int, message: str
) -> None:
    unchecked = getattr(resolve_expert_parallel, "__wrapped__", resolve_expert_parallel)
    with pytest.raises(ValueError, match=message):
        unchecked(requested, num_experts=[num_experts], world=world, ranks_per_node=world)


def test_one_layer_that_does_not_fit_is_enough_to_refuse() -> None:
    with pytest.raises(ValueError, match="num_experts=6 is not a multiple"):
        resolve_expert_parallel(4, num_experts=[4, 6, 8], world=4, ranks_per_node=4)


@pytest.mark.parametrize(
    ("num_experts", "world", "ranks_per_node", "expected"),
    [
        ([8], 4, 4, 4),
        ([6], 4, 4, 2),
        ([5], 4, 4, 1),
        ([8, 12], 16, 8, 4),
        ([64], 16, 8, 8),
        ([64], 12, 8, 4),
        ([], 4, 4, 1),
    ],
)
def test_auto_is_the_greatest_common_divisor_of_experts_node_and_world(
    num_experts: list[int], world: int, ranks_per_node: int, expected: int
) -> None:
    shape = resolve_expert_parallel(
        "auto", num_experts=num_experts, world=world, ranks_per_node=ranks_per_node
    )
    assert (shape.ep, shape.ep_dp) == (expected, world // expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "the size of axis world must be a positive integer, got 0"),
        ({"world": 4, "ep": 0}, "the size of axis ep must be a positive integer, got 0"),
        ({"world": 4, "pp": -1}, "the size of axis pp must be a positive integer, got -1"),
        ({"world": 8, "pp": 3}, "8 ranks can't be split into pp=3 x cp=1 x tp=1"),
        ({"world": 8, "cp": 2, "tp": 3}, "8 ranks can't be split into pp=1 x cp=2 x tp=3"),
        ({"world": 8, "pp": 2, "ep": 8}, r"=8 does not divide the 4 ranks \(8 ranks, pp=2\)"),
    ],
)
def test_impossible_axes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshShape(**sizes)


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is not one of 4 ranks"):
        MeshShape(world=4).coordinates(4, MOE_VIEW)


def test_groups_of_2048_ranks_take_no_quadratic_time() -> None:
    shape = MeshShape(world=2048, ep=8)
    for axis in ("stage", "ep_dp", "ep"):
        assert len(shape.groups(axis)[0]) * len(shape.groups(axis)) == 2048
