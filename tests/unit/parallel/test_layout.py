"""Arithmetic of one parameter's parts."""

from typing import Any

import pytest

from lightning_moe.parallel.layout import ParamSpec, plain_name


def _spec(**fields: Any) -> ParamSpec:
    defaults = {
        "name": "w",
        "kind": "non_expert",
        "shape": (6, 4),
        "num_shards": 1,
        "shard_index": 0,
    }
    defaults |= {"num_replicas": 4, "replica_index": 2, "split": True}
    return ParamSpec(**{**defaults, **fields})


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 6, 8])
def test_the_chunks_of_all_replicas_are_the_whole_tensor_once(num_replicas: int) -> None:
    covered: list[int] = []
    for replica in range(num_replicas):
        spec = _spec(num_replicas=num_replicas, replica_index=replica)
        covered += range(spec.chunk_start, spec.chunk_start + spec.chunk)
    assert covered == list(range(24))


def test_a_replicated_parameter_is_one_chunk_that_counts_once_over_all_ranks() -> None:
    spec = _spec(split=False)
    assert (spec.chunk, spec.chunk_start, spec.norm_share) == (24, 0, 0.25)


def test_a_split_parameter_counts_as_it_is() -> None:
    assert _spec().norm_share == 1.0


def test_experts_go_on_along_dimension_zero() -> None:
    spec = _spec(kind="expert", shape=(3, 5, 2), num_shards=4, shard_index=1)
    assert (spec.numel, spec.global_shape, spec.global_numel) == (30, (12, 5, 2), 120)


def test_a_dense_parameter_is_its_own_global_shape() -> None:
    assert (_spec().global_shape, _spec().global_numel) == ((6, 4), 24)


def test_a_scalar_has_one_element() -> None:
    assert _spec(shape=(), split=False).numel == 1


def test_names_lose_the_prefixes_of_compiled_modules() -> None:
    assert plain_name("model._orig_mod.blocks.0._orig_mod.w") == "model.blocks.0.w"
