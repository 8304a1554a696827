"""Peers divide a step among them: together they compute about as much as was asked for, whatever one knows of the
others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hivemind.utils.performance_ema import PerformanceEMA

from volunteer_kit.swarm import meeting
from volunteer_kit.swarm.turns import Other, may_compute, seconds_of_others, share_of, takes_turns


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


def other(samples=0.0, usual=None, waits=False, place=1, is_in_round=False):
    return Other(samples, usual, waits, place, is_in_round=is_in_round)


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
        (8, 4, 1, [other(4, usual=8, place=0, is_in_round=True)], True),  # it took the step for complete too early
        (8, 4, 1, [other(7, usual=8, place=0, is_in_round=True)], True),  # though ours is then more than was missing
        (8, 4, 1, [other(8, place=0, is_in_round=True)], False),
        (4, 4, 1, [other(4, place=0, is_in_round=True), other(4, waits=True, place=2)], True),  # the first that waits
        (4, 4, 2, [other(4, place=0, is_in_round=True), other(4, waits=True, place=1)], False),
        (4, 4, 2, [other(4, usual=4, place=0, is_in_round=True), other(4, usual=8, place=1)], True),
        (8, 4, 2, [other(4, usual=4, place=0, is_in_round=True), other(0, usual=8, place=1)], False),
    ],
)
def test_another_batch_is_computed_when_others_will_not_bring_it(own, batch, place, others, may):
    assert may_compute(own, batch, 16, place, others) is may


def test_a_slow_device_is_not_waited_for_longer_than_a_batch():
    """10 and 0.5 samples/s: an even share each would take the slow one an hour, and the quick one would stand still."""
    own, slow, seconds = 0.0, 0.0, 0.0
    while own + slow < 4096:
        ahead = 3.0 + 8 / 10
        assert may_compute(own, 8, 4096, 0, [Other(slow, None, False, 1, speed=0.5)], ahead) or own + slow > 4080
        own, seconds = own + 8, seconds + 0.8
        slow = 0.5 * seconds
    assert seconds < 400


@pytest.mark.parametrize(
    ("samples", "speed", "seconds"),
    [(0, 4.0, 2.0), (4, 4.0, 1.0), (8, 4.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 3.0), (0, 0.0, 0.0)],  # 8 of 16 are its share
)
def test_a_slow_device_is_given_the_time_that_its_share_takes(samples, speed, seconds):
    found = seconds_of_others(4, 16, [Other(samples, None, False, 1, speed)], 3.0)
    assert found == pytest.approx(seconds)


def test_a_quick_device_is_left_its_share():
    assert not may_compute(8, 4, 16, 0, [Other(0, None, False, 1, speed=500.0)], 3.0)


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


class Alike:
    """What await_turn knows of an optimizer, with a clock that its looks and rounds move on."""

    delay_grad_averaging, cut_off, takes_turns = False, None, False

    def __init__(self, others, own=8, rounds=()):
        self.now, self.local_epoch, self.target_batch_size = 0.0, 3, 16
        self.others, self.rounds, self.story = others, list(rounds), []
        self._counts_on, self._looked_in = meeting.MeetingOptimizer._counts_on, -1
        self.grad_averager = SimpleNamespace(local_samples_accumulated=own)
        self.tracker = SimpleNamespace(
            others_at_work=lambda epoch: (0, self.others), wait_in=lambda epoch: self.story.append(epoch),
            tell_now=lambda: None, look_again=lambda timeout: None, min_refresh_period=0.5, seconds_in_epoch=1.0,
            performance_ema=PerformanceEMA(), global_progress=SimpleNamespace(num_peers=2),
        )  # fmt: skip

    def step(self, batch_size):
        assert batch_size == 0
        if self.rounds and self.now >= self.rounds[0]:
            self.rounds.pop(0)
            self.local_epoch += 1
            self.grad_averager.local_samples_accumulated = 0

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    ("others", "rounds", "last", "least", "most"),
    [
        ([other(4)], [], None, 10, 12),  # it is never heard of again, and had brought nothing before
        ([other(4, usual=8)], [], None, 3, 4),  # the step lacks 4
        ([other(8, usual=8)], [], None, 6, 8),  # it lacks nothing, and does not come all the same
        ([other(8, usual=8)], [1.0], None, 1, 2),  # a round came, and the next step needs us
        ([other(8, usual=8)], [1.0], 4, 1, 2),  # that was the last
        ([other(0, usual=2)], [], None, 0, 0),
        ([], [], None, 0, 0),
    ],
)
def test_a_peer_with_its_share_waits_for_the_others_and_not_for_ever(monkeypatch, others, rounds, last, least, most):
    alike = Alike(others, rounds=rounds)
    monkeypatch.setattr(meeting, "time", alike)
    meeting.MeetingOptimizer.await_turn(alike, 4, last)
    assert least <= alike.now <= most
    assert alike.story[-1] is None and (3 in alike.story) is (most > 0)
    if not rounds and most > 0:  # in vain: in this epoch it does not wait again
        before = alike.now
        meeting.MeetingOptimizer.await_turn(alike, 4, last)
        assert alike.now == before


def test_with_one_batch_a_step_the_second_peer_is_told_that_it_takes_turns(monkeypatch):
    alike = Alike([other(8, usual=8)], rounds=[1.0])
    alike.tracker.others_at_work = lambda epoch: (epoch % 2, [other(0, usual=16, place=(epoch + 1) % 2)])
    alike.grad_averager.local_samples_accumulated = 0
    monkeypatch.setattr(meeting, "time", alike)
    meeting.MeetingOptimizer.await_turn(alike, 16)
    assert alike.takes_turns and alike.local_epoch == 4 and 1 <= alike.now <= 2
