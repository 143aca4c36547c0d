"""Sums over the steps of an entry, where layers differ in what they have."""

import dataclasses
import math

import torch

from lightning_moe.callbacks.routing_sums import RoutingSums
from tests.kit.monitored import RECORDS
from tests.kit.records import token_routes


def test_margins_that_are_infinite_are_left_out_of_their_mean_only() -> None:
    routes = token_routes([0.5, math.inf, 7.0], [1.0, 0.5, 7.0], [True, True, False])
    record = dataclasses.replace(RECORDS[0], tokens=routes)
    sums = RoutingSums([4], [0], 1, torch.device("cpu"))
    sums.observe([record])
    sums.end_step(keep=True)
    (layer,) = sums.unpack(sums.pack())
    assert (layer.margin.item(), layer.entropy.item()) == (0.5, 0.75)
    assert sums.pack().abs().sum() == 0


def test_layers_without_drops_or_traces_count_beside_those_that_have_them() -> None:
    routes = token_routes([0.5, 0.25], [1.0, 0.0], [True, True])
    dropless = dataclasses.replace(RECORDS[2], lost_tokens=None)
    sums = RoutingSums([4, 4], [0], 1, torch.device("cpu"))
    sums.observe([dropless, dataclasses.replace(RECORDS[3], tokens=routes)])
    sums.end_step(keep=True)
    assert sums.drops
    first, second = sums.unpack(sums.pack())
    assert [first.lost_tokens.item(), second.lost_tokens.item()] == [0, 2]
    assert first.margin.isnan()
    assert (second.margin.item(), second.entropy.item()) == (0.375, 0.5)
