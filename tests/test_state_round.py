"""How far a round of state averaging may carry us."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import PeerID

from volunteer_kit.swarm.agreement import SKETCH_SIZE, Told
from volunteer_kit.swarm.averager import Round
from volunteer_kit.swarm.state import SwarmStateAverager
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


@pytest.mark.parametrize("shared", [True, False], ids=["another holds the same", "nobody does"])
def test_how_far_is_counted_from_the_last_epoch_at_which_another_held_the_same(monkeypatch, shared):
    """Else the bound would grow with each round that a liar spoils, until it holds nothing off."""
    one, liar = PeerID(b"one"), PeerID(b"liar")
    averager = object.__new__(SwarmStateAverager)
    averager._parent_pid = None  # it has no process to end
    averager.reuse_tensors, averager.remarks, averager._agreed_at, averager._state_epoch = True, {}, 3, 50
    own = Told(50, np.ones(SKETCH_SIZE)).words()
    gathered = {one: own if shared else Told(50, -np.ones(SKETCH_SIZE)).words(), liar: [50]}
    outcome = Round(group=(one, liar), gathered=gathered, kept_own="tensor 0 would move by 46")
    for name, value in {"told": own, "peer_id": PeerID(b"own"), "_bound_round": Mock(), "to_tell": Mock()}.items():
        monkeypatch.setattr(SwarmStateAverager, name, value)
    control = Mock(result=Mock(return_value=outcome))
    monkeypatch.setattr(DecentralizedAverager, "step", Mock(return_value=control))
    averager._average_parameters(timeout=1.0)
    assert averager.remarks == {"state averaging": "we keep our own parameters: tensor 0 would move by 46"}
    assert averager._agreed_at == (50 if shared else 3)


def test_the_measure_of_our_own_last_steps():
    own, steps = [torch.tensor([30.0, 40.0]), torch.zeros(2)], OwnSteps()
    assert steps.bounds(own, 2) == [ROUNDING * 50.0, 0.0], "without any step of ours the codec's rounding is all"
    for size in (100.0, 1.0, 2.0):
        steps.moved([torch.zeros(2), torch.zeros(2)], [torch.tensor([size, 0.0]), torch.tensor([0.0, 2 * size])])
    assert steps.bounds(own, 2) == pytest.approx([SPREAD * 3.0 + ROUNDING * 50.0, SPREAD * 6.0])
    assert steps.bounds(own, REMEMBERED) == pytest.approx([SPREAD * 103.0 + ROUNDING * 50.0, SPREAD * 206.0])
