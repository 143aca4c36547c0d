"""Sums over the steps of an entry, where layers differ in what they have."""

import dataclasses
import math

import torch

from lightning_moe.metrics.routing_sums import RoutingSums
from tests.kit.monitored import RECORDS
from tests.kit.records import token_routes


def test_margins_that_are_infinite_are_left_out_of_their_mean_only() -> None:
    routes = token_routes([0.5, math.inf, 7.0], [1.0, 0.5, 7.0], [True, True, False])
    record = dataclasses.replace(RECORDS[0], tokens=routes)
    sums = RoutingSums([4], [0], 1, torch.device("cpu"))
    sums.observe([record])
    sums.end_step(keep=True)
    (layer,) = sums.unpack(sums.pack(), [record.requested_E])
    assert (layer.margin_S.item(), layer.entropy_S.item()) == (0.5, 0.75)
    assert sums.pack().abs().sum() == 0


def test_layers_without_drops_or_traces_count_beside_those_that_have_them() -> None:
    routes = token_routes([0.5, 0.25], [1.0, 0.0], [True, True])
    dropless = dataclasses.replace(RECORDS[2], lost_tokens=None)
    sums = RoutingSums([4, 4], [0], 1, torch.device("cpu"))
    sums.observe([dropless, dataclasses.replace(RECORDS[3], tokens=routes)])
    sums.end_step(keep=True)
    assert sums.drops
    first, second = sums.unpack(sums.pack(), [record.requested_E for record in RECORDS[2:4]])
    assert [first.lost_tokens_S.item(), second.lost_tokens_S.item()] == [0, 2]
    assert math.isnan(first.margin_S.item())
    assert (second.margin_S.item(), second.entropy_S.item()) == (0.375, 0.5)
