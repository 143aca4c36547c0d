"""Named ranges of the profiler."""

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_moe.ops import ranges
from lightning_moe.ops.ranges import named_range


def _names(profiler: profile) -> list[str]:
    return [event.name for event in profiler.events() if event.name.startswith("lightning_moe")]


def test_a_range_is_seen_by_the_profiler_with_what_runs_inside() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, named_range("dispatch"):
        torch.ones(3).sum()
    assert _names(profiler) == ["lightning_moe.dispatch"]


def test_without_a_profiler_all_ranges_are_one_that_does_nothing() -> None:
    assert named_range("a") is named_range("b") is ranges._OFF


def test_a_compiled_function_stays_one_graph() -> None:
    def ranged(x: torch.Tensor) -> torch.Tensor:
        with named_range("experts"):
            return x * 2

    x = torch.ones(3)
    compiled = torch.compile(ranged, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), ranged(x))
