"""The bench's ledger: which samples were applied, and where the seconds went."""

from __future__ import annotations

import pytest

from benchmarks.home_parts.ledger import Account, account, time_to_loss
from benchmarks.home_parts.material import speeds_apart


def step(epoch: int, samples: int = 10, **more) -> dict:
    clock = {"computed": 9.0 * epoch, "contention": 0.5 * epoch, "between": 0.5 * epoch, "own_work": 0.0}
    wire = {"wire_sent": 1000 * epoch, "wire_received": 2000 * epoch}
    said = {"event": "step", "at": 10.0 * epoch, "epoch": epoch, "samples": samples, "of": 10, "pending": 0}
    return {**said, "failure": None, "group_size": 2, **clock, **wire, **more}


def test_an_account_is_of_the_time_between_two_steps():
    found = account([step(epoch) for epoch in range(1, 7)], speed=10 / 9, workers=2, begin=15.0, end=55.0)
    assert (found.wall, found.steps, found.complete, found.samples) == (30.0, 3, 3, 30)
    assert found.applied == pytest.approx(27.0)
    assert (found.lost, found.waiting, found.contention) == pytest.approx((0.0, 1.5, 1.5))
    assert found.goodput == pytest.approx(27 / 28.5)
    assert (found.wire_sent, found.wire_received) == (3000, 6000)


@pytest.mark.parametrize(
    "before, after, taken, counted", [(4, 6, 10, 22), (4, 6, 5, 21), (4, 6, 0, 16), (12, 0, 9, 10)]
)
def test_what_was_under_way_counts_for_the_window_in_which_it_was_computed(before, after, taken, counted):
    """At the end as far as the next step took it; and of the first step after the beginning no more than it took."""
    steps = [step(1, pending=before), step(2), step(3, pending=after), step(4, samples=taken)]
    assert account(steps, speed=10 / 9, workers=2, begin=5.0, end=45.0).samples == counted
    assert account(steps[:2], speed=10 / 9, workers=2, begin=5.0, end=25.0).samples == 10


def test_a_backlog_is_of_the_window_in_which_it_was_computed():
    """A worker of the kit was late for the first rounds. A part of its backlog expires, the rest comes in over several
    steps; neither is of the window. At its end of 9 pending samples 7 come in."""

    def told(epoch: int, computed: int, committed: int, pending: int, samples: int = 10) -> dict:
        totals = {"computed": computed, "committed": committed, "pending": pending}
        return step(epoch, samples=samples, pending=pending, totals=totals)

    steps = [told(1, 40, 0, 40), told(2, 50, 15, 20), told(3, 60, 30, 15), told(4, 70, 46, 9), told(5, 79, 53, 9, 7)]
    found = account(steps, speed=10 / 9, workers=2, begin=5.0, end=45.0)
    assert found.samples == 30 - 2
    unlucky = [*steps[:3], told(4, 70, 16, 9), told(5, 79, 23, 9, 7)]  # 45 expired, of which the backlog was 40
    assert account(unlucky, speed=10 / 9, workers=2, begin=5.0, end=45.0).samples == 30 - 5 - 2


def test_the_time_of_a_worker_that_is_stuck_counts():
    """Its download took the rest of the trial: it makes no step any more, and is no less a device for that."""
    beat = {**step(5), "event": "beat", "at": 50.0}
    found = account([*map(step, range(1, 5)), beat], speed=10 / 9, workers=2, begin=5.0, end=110.0)
    assert (found.wall, found.samples, found.steps) == (100.0, 30, 3)
    assert found.applied == pytest.approx(27.0) and found.lost == pytest.approx(9.0)
    assert found.waiting == pytest.approx(2.0 + 60.0)


def test_who_has_made_no_two_steps_has_no_account():
    assert account([step(1)], speed=1.0, workers=2, begin=0.0, end=99.0) == Account()


def test_a_level_of_loss_is_reached_by_the_mean():
    curve = [(float(s), 10.0 - s) for s in range(10)]
    assert time_to_loss(curve, level=6.0, width=3) == 5.0
    assert time_to_loss(curve, level=-5.0, width=3) is None


def test_speeds_are_as_far_apart_as_asked_and_together_what_was_asked():
    speeds = speeds_apart(8, ratio=16, total=100)
    assert sum(speeds) == pytest.approx(100)
    assert max(speeds) / min(speeds) == pytest.approx(16)
