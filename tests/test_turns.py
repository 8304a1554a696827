"""A step of fewer batches than peers: they take turns."""

from __future__ import annotations

import pytest

from volunteer_kit.training.turns import is_turn, share_of, takes_turns


def test_turns_are_taken_when_a_step_is_less_than_a_batch_of_each():
    assert takes_turns(2, 8, 8) and takes_turns(3, 8, 16)
    assert not takes_turns(2, 8, 16) and not takes_turns(1, 8, 8)


@pytest.mark.parametrize(
    ("peers", "batch", "target", "at_once"),
    [(2, 8, 8, 1), (3, 8, 16, 2), (3, 8, 12, 2), (5, 8, 4, 1), (2, 8, 16, 2), (1, 8, 2, 1)],
)
def test_each_step_is_computed_by_as_many_as_it_holds_batches_and_all_get_their_turns(peers, batch, target, at_once):
    turns = [[is_turn(place, peers, batch, target, epoch) for place in range(peers)] for epoch in range(peers * 2)]
    assert all(sum(epoch) == at_once for epoch in turns)
    assert {sum(of_one) for of_one in zip(*turns, strict=True)} == {2 * at_once}


@pytest.mark.parametrize(
    ("own", "others", "peers", "share"),
    [
        (0.0, [5.0], 3, 1 / 3),  # it has measured nothing yet
        (4.0, [], 3, 1 / 3),  # nobody else has said a speed
        (4.0, [4.4, 3.6], 3, 1 / 3),  # as fast as the others, but for noise
        (4.0, [12.0, 12.0], 3, 4 / 28),
        (12.0, [4.0, 12.0], 3, 12 / 28),
        (4.0, [0.0, 12.0], 3, 4 / 20),  # one is taken for as fast as this peer
        (4.0, [12.0] * 5, 3, 4 / 28),  # records of peers that are gone
        (4.0, [1e9], 2, 1 / 17),  # nobody makes another one idle
        (1e9, [4.0], 1, 1.0),
    ],
)
def test_shares_follow_the_speeds(own, others, peers, share):
    assert share_of(own, others, peers) == pytest.approx(share)


def test_the_shares_of_a_swarm_are_a_whole():
    speeds = [1.0, 2.0, 8.0, 30.0]
    shares = [share_of(own, [*speeds[:n], *speeds[n + 1 :]], 4) for n, own in enumerate(speeds)]
    assert sum(shares) == pytest.approx(1.0, rel=0.3)
