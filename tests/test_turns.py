"""Who computes what of a step: together about as much as was asked for, whatever one knows of the others."""

from __future__ import annotations

import math

import pytest

from volunteer_kit.swarm.turns import Other, may_compute, share_of, takes_turns


@pytest.mark.parametrize(
    ("peers", "batch", "target", "shares"),
    [
        (1, 4, 16, [16]),
        (2, 4, 16, [8, 8]),
        (2, 3, 8, [6, 3]),
        (2, 8, 8, [8, 0]),
        (3, 8, 16, [8, 8, 0]),
        (3, 1, 100, [34, 33, 33]),
        (2, 6, 16, [12, 6]),
        (4, 0.7, 2.1, [0.7, 0.7, 0.7, 0]),
    ],
)
def test_shares_are_whole_batches_and_hold_the_target(peers, batch, target, shares):
    found = [share_of(place, peers, batch, target) for place in range(peers)]
    assert found == pytest.approx(shares)
    assert target <= sum(found) + 1e-6 < target + batch + 1e-6


def other(samples=0.0, usual=None, waits=False, place=1):
    return Other(samples, usual, waits, place)


@pytest.mark.parametrize(
    ("own", "batch", "place", "others", "may"),
    [
        (12, 4, 0, [], True),  # of a target of 16
        (4, 4, 0, [other()], True),
        (8, 4, 0, [other()], False),  # it has its share; the other's record is of no sample yet
        (8, 4, 0, [other(4)], False),
        (8, 4, 0, [other(0, usual=4)], True),  # a slow one, that never brings more
        (12, 4, 0, [other(0, usual=4)], False),
        (8, 4, 0, [other(6, usual=2)], False),  # it has more than usual already
        (8, 4, 0, [other(4, waits=True)], True),  # both wait: the first one goes on
        (8, 4, 1, [other(4, waits=True, place=0)], False),
        (8, 4, 0, [other(8, waits=True)], False),  # the step is full
        (0, 16, 1, [other(place=0)], False),  # one batch is a step
        (0, 16, 0, [other(place=1)], True),
        (4, 4, 2, [other(place=0), other(place=1)], False),  # 2 + 1 + 1 batches
        (4, 4, 0, [other(place=1), other(place=2)], True),
    ],
)
def test_another_batch_is_computed_when_others_will_not_bring_it(own, batch, place, others, may):
    assert may_compute(own, batch, 16, place, others) is may


def test_turns_are_taken_when_a_step_is_less_than_a_batch_of_each():
    assert takes_turns(2, 8, 8) and takes_turns(3, 8, 16)
    assert not takes_turns(2, 8, 16) and not takes_turns(1, 8, 8)


@pytest.mark.parametrize(
    ("batches", "target"), [((4, 4), 16), ((8, 8), 8), ((2, 8), 16), ((3, 3, 3), 16), ((5, 1), 16)]
)
@pytest.mark.parametrize("blind", [True, False])
def test_quick_peers_hold_at_most_a_batch_too_much(batches, target, blind):
    """All compute at once. Blind: they hear of each other only when one waits, as where steps are shorter than the time
    between two looks."""
    peers = len(batches)
    for epoch in range(4):
        own, waits = [0] * peers, [False] * peers
        while sum(own) < target:
            seen = [0 if blind and not waits[peer] else own[peer] for peer in range(peers)]
            may = [
                may_compute(
                    own[peer], batches[peer], target, (peer - epoch) % peers,
                    [other(seen[p], None, waits[p], (p - epoch) % peers) for p in range(peers) if p != peer],
                )
                for peer in range(peers)
            ]  # fmt: skip
            assert any(may) or not all(waits), "nobody goes on"
            own = [held + batch * goes for held, batch, goes in zip(own, batches, may, strict=True)]
            waits = [not goes for goes in may]
        assert sum(own) < target + max(batches) * (1 if len(set(batches)) == 1 else 2), own
        assert math.isfinite(sum(own))
