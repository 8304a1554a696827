"""Which states are believed, as tables."""

from __future__ import annotations

import math

import pytest
import torch

from volunteer_kit.swarm.state.plausibility import (
    MAX_LOSS_RISE,
    Evidence,
    both_ways,
    distances,
    reason_to_refuse_state,
)

NAN, INF = math.nan, math.inf


def evidence(**words) -> Evidence:
    return Evidence(**{"epoch": 105, "ground": 100, "moved": [1.0], "bounds": [2.0], **words})


@pytest.mark.parametrize(
    "words, reason",
    [
        ({}, None),
        ({"moved": [2.0]}, None),
        ({"moved": [2.1]}, "tensor 0"),
        ({"moved": [1.0, 3.0], "bounds": [2.0, 2.0]}, "tensor 1"),
        ({"moved": [NAN]}, "tensor 0"),
        ({"moved": [INF], "bounds": [INF]}, None),
        ({"bounds": [NAN]}, "tensor 0"),
        ({"bounds": [2.0, 2.0]}, "another model"),
        ({"loss": 4.4, "loss_of_ground": 4.4}, None),
        ({"loss": 4.4 + MAX_LOSS_RISE - 0.01, "loss_of_ground": 4.4}, None),
        ({"loss": 4.4 + MAX_LOSS_RISE + 0.01, "loss_of_ground": 4.4}, "public samples"),
        ({"loss": NAN, "loss_of_ground": 4.4}, "not finite"),
        ({"loss": INF, "loss_of_ground": NAN}, "not finite"),
        ({"loss": 4.4, "loss_of_ground": NAN}, None),  # the ground itself is ruined; its successor need not be
    ],
)
def test_what_is_believed(words, reason):
    found = reason_to_refuse_state(evidence(**words))
    assert found is None if reason is None else reason in found


def test_distances_are_of_the_values():
    before = [torch.zeros(3, 4), torch.ones(2**20 + 5), torch.zeros(0), torch.tensor(2.0)]
    after = [torch.ones(3, 4), torch.ones(2**20 + 5), torch.zeros(0), torch.tensor(-1.0)]
    assert distances(before, after) == [pytest.approx(math.sqrt(12)), 0.0, 0.0, 3.0]
    assert math.isnan(distances([torch.zeros(2)], [torch.tensor([0.0, NAN])])[0])


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.2])
def test_two_that_were_one_are_never_farther_apart(rate):
    """Both moved as far as they can, in opposite directions; ours is known only where it is now."""
    for direction in (1, -1):
        ours = theirs = 1.0
        for _ in range(2):
            ours *= 1 + direction * rate
        for _ in range(3):
            theirs *= 1 - direction * rate
        bound = [ours * ((1 + rate) ** steps - 1) for steps in (2, 3)]
        assert abs(ours - theirs) <= both_ways(ours, *bound)
    assert both_ways(0.0, 1.0, 2.0) == 3.0 and both_ways(1.0, 1.0, 1.0) == INF
