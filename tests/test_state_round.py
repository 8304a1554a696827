"""How far a round of state averaging may carry us."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.swarm.state_round import REMEMBERED, ROUNDING, SPREAD, OwnSteps, reason_to_keep_own

NAN = float("nan")


@pytest.mark.parametrize(
    "average, bounds, words",
    [
        ([[3.0, 4.0], [1.0]], [0.0, 0.0], None),
        ([[3.0, 4.5], [1.0]], [0.5, 0.0], None),
        ([[3.0, 4.6], [1.0]], [0.5, 0.0], "tensor 0 would move by 0.6"),
        ([[3.0, 4.0], [-1.0]], [0.5, 1.9], "tensor 1 would move by 2; honest steps cannot have set us apart by 1.9"),
        ([[90.0, 120.0], [30.0]], [0.5, 0.5], "tensor 0"),
        ([[NAN, 4.0], [1.0]], [1e9, 1e9], "tensor 0"),
        ([[3.0, 4.0], [1.0]], [NAN, NAN], "tensor 0"),
        ([[1e30, 1e30], [1.0]], [1e9, 1e9], "tensor 0"),
    ],
)
def test_reason_to_keep_own(average, bounds, words):
    own = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    reason = reason_to_keep_own(own, list(map(torch.tensor, average)), bounds)
    assert reason is None if words is None else words in reason


def test_the_measure_of_our_own_last_steps():
    own, steps = [torch.tensor([30.0, 40.0]), torch.zeros(2)], OwnSteps()
    assert steps.bounds(own, 2) == [ROUNDING * 50.0, 0.0], "without any step of ours the codec's rounding is all"
    for size in (100.0, 1.0, 2.0):
        steps.moved([torch.zeros(2), torch.zeros(2)], [torch.tensor([size, 0.0]), torch.tensor([0.0, 2 * size])])
    assert steps.bounds(own, 2) == pytest.approx([SPREAD * 3.0 + ROUNDING * 50.0, SPREAD * 6.0])
    assert steps.bounds(own, REMEMBERED) == pytest.approx([SPREAD * 103.0 + ROUNDING * 50.0, SPREAD * 206.0])
