"""The measurement of the load monitor's cost runs and counts its parts. No time is checked."""

import pytest

from tests.peers.monitor_cost import measure


@pytest.mark.filterwarnings("ignore:.*val_dataloader")
def test_calls_and_margins_are_parts_of_the_steps() -> None:
    cost = measure(num_steps=3, batch_size=2, length=16, every_n_steps=2)
    assert 0 < cost.margins < cost.steps
    assert 0 < cost.calls < cost.steps
    assert cost.share == pytest.approx((cost.calls + cost.margins) / cost.steps)
    assert cost.end > 0
